"""Planners of the arms, each against the rule its system documents, on clusters made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from sim.arm_views import asked, decode_node, names, prefill_node

from evolving.core.planner import Split, SplitShape, assign
from evolving.core.terms import Role
from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients
from evolving.core.work import PrefillWork
from evolving_sim.arms.arrow import (
    ArrowDecode,
    ArrowPrefill,
    ArrowScheduler,
    profiled_prefill_s,
    profiled_tpot_s,
)
from evolving_sim.arms.dynamo_planner import DynamoPlanner
from evolving_sim.arms.parameters import ArrowConfig, CacheAffinityConfig, DynamoPlannerConfig
from evolving_sim.arms.sglang import CacheAffinity, RoundRobin
from evolving_sim.events import EventHeap
from evolving_sim.node_config import NodeConfig

# 1,000 tokens a second; a request of the batch adds 5 ms to each token of all.
MACHINE = NodeConfig(
    PrefillCoefficients(c0_s=0.0, c1_s=0.001, c2_s=0.0),
    DecodeCoefficients(d0_s=0.0, d1_s=0.0, d2_s=0.005),
    l1_tokens=10_000,
)


@dataclass
class Prompt:
    context_tokens: int
    awaits_room: bool = True


@dataclass
class Node:
    queue: list[Prompt] = field(default_factory=list)
    running: list[Prompt] = field(default_factory=list)
    decoding: int = 0
    context_tokens: int = 0


class Cluster:
    """Nodes n0, n1, …, prefilling ones first."""

    def __init__(self, shape: str) -> None:
        wanted = SplitShape.parse(shape)
        ids = [f"n{number}" for number in range(wanted.total)]
        self.split = Split(1, assign(wanted, {}, ids))
        self.configs = dict.fromkeys(ids, MACHINE)
        self.nodes = {node_id: Node() for node_id in ids}
        self.shapes = [shape]
        self.restarting: set[str] = set()

    @property
    def roles(self) -> dict[str, Role]:
        return {**self.split.roles, **dict.fromkeys(self.restarting, Role.DRAINING)}

    def change(self, split: Split) -> None:
        assert split.epoch == self.split.epoch + 1
        self.split = split
        roles = list(split.roles.values())
        self.shapes.append(f"{roles.count(Role.PREFILL)}P{roles.count(Role.DECODE)}D")

    def queue(self, node_id: str, *tokens: int) -> None:
        self.nodes[node_id].queue = [Prompt(each) for each in tokens]

    def decode(self, node_id: str, requests: int, tokens: int) -> None:
        node = self.nodes[node_id]
        node.decoding, node.context_tokens = requests, tokens


# -- Dynamo's planner


def dynamo(cluster: Cluster) -> tuple[DynamoPlanner, EventHeap]:
    """Its thresholds over a context of 1,000 tokens."""
    events = EventHeap()
    planner = DynamoPlanner(DynamoPlannerConfig(context_tokens=1_000, first_look_s=5.0))
    planner.begin(events, cluster)
    return planner, events


# queues of n0 and n1, KV of n2 and n3 of 10,000 tokens; the split after a look
CASES = [
    # Both ask: 3 of 4 for prefill; 3P3D, of which prefill has 2; 1P3D; 1P1D, which is 2P2D again.
    ((1_000, 0), (5_999, 0), "3P1D"),  # a queue as long as a context, and nobody fills 0.6
    ((1_000, 0), (10_001, 0), "2P2D"),
    ((99, 99), (10_001, 0), "1P3D"),  # KV is short on a node, and no queue holds a tenth of a context
    ((0, 0), (0, 0), "2P2D"),
    # One asks for more: 3P2D, of which prefill has 2.4; 2P3D, of which it has 1.6.
    ((1_000, 0), (6_000, 0), "2P2D"),
    ((99, 100), (10_001, 0), "1P3D"),
    # One asks for less: a node would be left without a phase.
    ((999, 0), (5_999, 0), "2P2D"),
    ((99, 99), (10_000, 10_000), "2P2D"),  # full is not too full
    # Neither asks.
    ((999, 0), (6_000, 10_000), "2P2D"),
]


@pytest.mark.parametrize(("queues", "kv", "after"), CASES)
def test_dynamo_brings_what_the_phases_ask_for_to_the_nodes_there_are(
    queues: Sequence[int], kv: Sequence[int], after: str
) -> None:
    cluster = Cluster("2P2D")
    for node_id, tokens in zip(("n0", "n1"), queues, strict=True):
        cluster.queue(node_id, tokens)
    for node_id, tokens in zip(("n2", "n3"), kv, strict=True):
        cluster.decode(node_id, 1, tokens)
    planner, events = dynamo(cluster)
    events.run_until(5.0)
    assert cluster.shapes[-1] == after
    assert [(switch.at_s, switch.shape, switch.moves) for switch in planner.switches] == (
        [(5.0, after, 1)] if after != "2P2D" else []
    )


def test_dynamo_hears_of_no_prompt_that_has_room_where_it_decodes() -> None:
    """SGLang's prefill nodes count as queued what waits for the decode node's room, and nothing else."""
    cluster = Cluster("2P2D")
    cluster.nodes["n0"].queue = [Prompt(5_000, awaits_room=False)]
    cluster.decode("n2", 1, 10_001)
    _, events = dynamo(cluster)
    events.run_until(5.0)
    assert cluster.shapes[-1] == "1P3D"


@pytest.mark.parametrize(
    ("before", "prefill_asks", "decode_asks", "after"),
    [
        ("6P3D", 0, 1, "5P4D"),  # 10 nodes: 5.4 and the rest
        ("6P3D", 1, 0, "6P3D"),  # 6.3
        ("6P3D", 1, 1, "5P4D"),  # 11 nodes: 5.7
        ("4P5D", 1, 1, "4P5D"),  # 4.1
        ("4P5D", 1, 0, "4P5D"),  # 4.5: prefill gets none that decode doesn't give
        ("4P5D", 1, -1, "5P4D"),
        ("3P6D", 0, 1, "2P7D"),
        ("2P7D", -1, 1, "1P8D"),
        ("6P3D", -1, -1, "7P2D"),  # 7 nodes: 6.4 rounded up, "scale-down proposals into scale-up churn"
        ("4P5D", -1, -1, "4P5D"),
        ("6P3D", -1, 0, "6P3D"),
        ("1P8D", 0, 1, "1P8D"),
    ],
)
def test_dynamo_shares_nodes_in_proportion(before: str, prefill_asks: int, decode_asks: int, after: str) -> None:
    """Two of these are what its later versions guard against (its pull request 14231)."""
    cluster = Cluster(before)
    for node_id, role in cluster.roles.items():
        if role is Role.PREFILL:
            cluster.queue(node_id, {1: 1_000, 0: 500, -1: 0}[prefill_asks])
        else:
            cluster.decode(node_id, 1, {1: 10_001, 0: 8_000, -1: 0}[decode_asks])
    _, events = dynamo(cluster)
    events.run_until(5.0)
    assert cluster.shapes[-1] == after


def test_a_queue_counts_whole_prompts_but_not_the_one_that_is_computed() -> None:
    """ "All token counts here are raw totals", of requests that wait (Dynamo's forward-pass metrics)."""
    cluster = Cluster("2P2D")
    cluster.nodes["n0"].running = [Prompt(5_000)]
    cluster.queue("n0", 400, 599)
    cluster.decode("n2", 1, 4_000)
    planner, events = dynamo(cluster)
    events.run_until(5.0)
    assert not planner.switches
    cluster.queue("n0", 400, 600)
    events.run_until(10.0)
    assert cluster.shapes[-1] == "3P1D"


def test_dynamo_only_observes_while_a_node_restarts() -> None:
    """§2.1: each switch takes minutes; "Scaling in progress, observing only" (Dynamo's load scaling)."""
    cluster = Cluster("5P1D")
    cluster.decode("n5", 9, 20_000)
    planner, events = dynamo(cluster)
    events.run_until(5.0)
    cluster.restarting = {"n4"}
    events.run_until(685.0)
    assert cluster.shapes == ["5P1D", "4P2D"]
    cluster.restarting = set()
    events.run_until(690.0)
    assert cluster.shapes == ["5P1D", "4P2D", "3P3D"]
    assert [switch.at_s for switch in planner.switches] == [5.0, 690.0]


def test_dynamo_looks_first_when_the_agents_of_a_run_are_there() -> None:
    cluster, events = Cluster("3P3D"), EventHeap()
    DynamoPlanner(DynamoPlannerConfig()).begin(events, cluster)
    cluster.decode("n5", 9, 20_000)
    events.run_until(59.9)
    assert cluster.shapes == ["3P3D"]
    events.run_until(60.0)
    assert cluster.shapes == ["3P3D", "2P4D"]


def test_dynamo_leaves_each_phase_a_node() -> None:
    cluster = Cluster("1P1D")
    cluster.decode("n1", 9, 20_000)
    _, events = dynamo(cluster)
    events.run_until(50.0)
    cluster.decode("n1", 0, 0)
    cluster.queue("n0", 5_000)
    events.run_until(100.0)
    assert cluster.shapes == ["1P1D"]


def test_long_contexts_that_fill_decode_nodes_draw_one_after_another() -> None:
    """§2.2: KV utilisation that stays high takes the split beyond the best one, towards decode."""
    cluster = Cluster("6P3D")
    for node_id in cluster.nodes:
        cluster.decode(node_id, 9, 10_500)
    _, events = dynamo(cluster)
    events.run_until(2_000.0)
    assert cluster.shapes == ["6P3D", "5P4D", "4P5D", "3P6D", "2P7D", "1P8D"]


# -- Arrow


class Arrow:
    """A scheduler at work, with its routing."""

    def __init__(self, cluster: Cluster, config: ArrowConfig | None = None) -> None:
        self.cluster, self.events = cluster, EventHeap()
        self.scheduler = ArrowScheduler(config or ArrowConfig())
        self.prefill = ArrowPrefill(CacheAffinity(CacheAffinityConfig()), self.scheduler)
        self.decode = ArrowDecode(RoundRobin(), self.scheduler)
        self.scheduler.begin(self.events, cluster)

    def ask(self, tokens: int, **prefilling: int) -> str:
        """A prompt of so many tokens comes, where nodes have prompts of so many each."""
        ids = [node_id for node_id, role in self.cluster.roles.items() if role is Role.PREFILL]
        work = {
            node_id: [PrefillWork(10, prefilling[node_id] - 10)] if node_id in prefilling else [] for node_id in ids
        }
        nodes = [prefill_node(node_id, prefilling=work[node_id]) for node_id in ids]
        return self.prefill.choose(asked("r", names("a", tokens), block_tokens=1), nodes, self.events.now_s).node_id

    def answer(self, **decoding: int) -> str:
        """A request is to be decoded, where nodes decode so many."""
        nodes = [decode_node(node_id, decoding=count) for node_id, count in decoding.items()]
        return self.decode.choose(asked("r", names("a", 10)), nodes, self.events.now_s)


def test_arrow_predicts_prefill_from_the_whole_prompt() -> None:
    """§2.2: the cached prefix counts as if it were newly computed; quadratic in the length."""
    config = NodeConfig(PrefillCoefficients(0.01, 1e-4, 1e-8), MACHINE.decode, chunk_tokens=1_000)
    assert profiled_prefill_s(2_500, config) == pytest.approx(3 * 0.01 + 0.25 + 1e-8 * 2_500 * 2_501 / 2)


def test_arrow_predicts_decode_from_the_batch() -> None:
    config = NodeConfig(MACHINE.prefill, MACHINE.decode, accepted_tokens=2.0)
    assert profiled_tpot_s(8, 100, config) == pytest.approx(8 * 0.005 / 2.0)
    assert profiled_tpot_s(0, 0, config) == 0.0


@pytest.mark.parametrize(
    ("tokens", "prefilling", "moves"),
    [
        (998, {}, False),  # just within a second, with one token more
        (1_000, {}, True),
        (500, {"n0": 600, "n1": 498}, False),  # one node keeps the target
        (500, {"n0": 600, "n1": 500}, True),  # behind others' whole prompts, nearly all cached
    ],
)
def test_a_prompt_that_no_node_is_predicted_to_serve_in_time_draws_one_at_once(
    tokens: int, prefilling: dict[str, int], moves: bool
) -> None:
    arrow = Arrow(Cluster("2P2D"))
    arrow.ask(tokens, **prefilling)
    assert arrow.cluster.shapes == ["2P2D"], "the request that asks is routed among the nodes there are"
    arrow.events.run_until(0.0)
    assert arrow.cluster.shapes == (["2P2D", "3P1D"] if moves else ["2P2D"])
    assert len(arrow.scheduler.switches) == moves


def test_loaded_decode_nodes_give_prefill_none() -> None:
    """Load is time per token over its target of 50 ms: 5 requests have half of it."""
    arrow = Arrow(Cluster("2P2D"))
    for node_id in ("n2", "n3"):
        arrow.cluster.decode(node_id, 5, 100)
    arrow.ask(5_000)
    arrow.events.run_until(0.0)
    assert arrow.cluster.shapes == ["2P2D"]
    arrow.cluster.decode("n3", 4, 100)
    arrow.ask(5_000)
    arrow.events.run_until(0.0)
    assert arrow.cluster.shapes == ["2P2D", "3P1D"]


def test_a_burst_of_long_prompts_takes_all_decode_nodes_but_one() -> None:
    """§2.2: sub-agents that start at once push the split from 6P3D to 8P1D."""
    arrow = Arrow(Cluster("6P3D"))
    for _ in range(5):
        arrow.ask(5_000)
    arrow.events.run_until(0.0)
    assert arrow.cluster.shapes == ["6P3D", "7P2D", "8P1D"]


def test_an_answer_that_no_node_is_predicted_to_decode_in_time_draws_one_after_the_cooldown() -> None:
    arrow = Arrow(Cluster("3P2D"))
    arrow.events.run_until(9.5)
    arrow.answer(n3=10, n4=10)  # the eleventh is above 50 ms per token
    arrow.events.run_until(9.9)
    assert arrow.cluster.shapes == ["3P2D"], "the start counts as a move"
    arrow.events.run_until(10.0)
    arrow.answer(n3=10, n4=9)
    arrow.events.run_until(10.1)
    assert arrow.cluster.shapes == ["3P2D"], "n4 keeps the target"
    arrow.answer(n3=10, n4=10)
    arrow.answer(n3=10, n4=10)
    arrow.events.run_until(10.2)
    assert arrow.cluster.shapes == ["3P2D", "2P3D"], "one, then the cooldown again"


def test_a_look_moves_a_node_to_decode_when_it_stays_loaded() -> None:
    arrow = Arrow(Cluster("3P2D"), ArrowConfig(cooldown_s=0.0))
    for node_id in ("n0", "n1", "n2"):
        arrow.cluster.queue(node_id, 5_000)
    for node_id in ("n3", "n4"):
        arrow.cluster.decode(node_id, 10, 100)
    arrow.events.run_until(2.0)
    arrow.cluster.decode("n4", 9, 100)
    arrow.events.run_until(3.0)
    arrow.cluster.decode("n4", 10, 100)
    arrow.events.run_until(5.0)
    assert arrow.cluster.shapes == ["3P2D"], "three looks in a row"
    arrow.events.run_until(6.0)
    assert arrow.cluster.shapes == ["3P2D", "2P3D"]


@pytest.mark.parametrize(("queued", "requests", "moves"), [(500, 5, True), (501, 5, False), (500, 4, False)])
def test_a_look_moves_a_node_from_idle_prefill_to_busier_decode(queued: int, requests: int, moves: bool) -> None:
    """Where prefill's load is at most half its target and decode's at least half."""
    arrow = Arrow(Cluster("2P2D"), ArrowConfig(cooldown_s=0.0))
    for node_id in ("n0", "n1"):
        arrow.cluster.queue(node_id, queued)
    for node_id in ("n2", "n3"):
        arrow.cluster.decode(node_id, requests, 100)
    arrow.events.run_until(3.0)
    assert arrow.cluster.shapes == (["2P2D", "1P3D"] if moves else ["2P2D"])


def test_the_node_that_moves_has_work_of_the_other_phase_else_the_least_of_its_own() -> None:
    """Algorithm 3's cost."""
    arrow = Arrow(Cluster("1P3D"))
    for node_id, tokens in (("n1", 300), ("n2", 100), ("n3", 200)):
        arrow.cluster.decode(node_id, 1, tokens)
    arrow.ask(5_000)
    arrow.events.run_until(0.0)
    assert arrow.cluster.roles["n2"] is Role.PREFILL
    arrow.cluster.queue("n1", 10)
    arrow.ask(5_000)
    arrow.events.run_until(0.0)
    assert arrow.cluster.roles["n1"] is Role.PREFILL
