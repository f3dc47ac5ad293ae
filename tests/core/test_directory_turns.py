"""Homes that go all at once, when a node is gone or turns from decode to prefill: taken branch by branch, to the same
end as all at once; and what their branches are told."""

from __future__ import annotations

import random

import pytest
from core.model import Key, split_names
from core.pair import Pair, chain, run_ref
from core.served import TENANT, Cluster

from evolving.core.config import DecodeToPrefill, DirectoryConfig
from evolving.core.directory import Directory
from evolving.core.directory_log import LogEntry
from evolving.core.directory_types import Begin, BeginKind, CountUpdate, Effect, Landed, Loss, Output, Stored
from evolving.core.errors import NeedFull
from evolving.core.terms import Phase, Role, Tier

NODES = ("n0", "n1", "n2")
KEYS: list[Key] = [(TENANT, f"b{number}") for number in range(8)]


class Story:
    """Branches on nodes, in random order, beside the model; a turn is under way while branches go on."""

    def __init__(self, seed: int, rule: DecodeToPrefill) -> None:
        self.rng = random.Random(seed)
        config = DirectoryConfig(
            sweep_runs_per_tick=1, run_blocks_max=self.rng.choice([3, 256]), decode_to_prefill=rule
        )
        self.pair = Pair(config)
        self.sequences: dict[str, int] = {}
        self.switched: set[str] = set()
        self.requests = 0
        self.last: dict[Key, str] = {}  # branch -> the request that set its context
        for node_id in NODES:
            self.start(node_id)
        for key in KEYS:
            for _ in range(self.rng.choice([1, 2])):
                self.turn(key)

    def start(self, node_id: str) -> None:
        """A node comes up."""
        self.pair.node_up(node_id, f"life-{self.requests}")
        self.sequences[node_id] = 0
        self.switched.discard(node_id)

    def store(self, node_id: str, key: Key, blocks: int) -> None:
        """A node holds a branch's leading blocks in both tiers, or in one."""
        context = self.pair.model.branches[key].context
        self.sequences[node_id] += 1
        tiers = self.rng.choice([[Tier.L2], list(Tier), [Tier.L1]])
        if node_id in self.switched:  # what it claims is decided by what is in its L2 when a branch's turn comes
            tiers = [Tier.L1]
        run = run_ref(context, 0, blocks)
        self.pair.node_events(node_id, self.sequences[node_id], [Stored(tier, run) for tier in tiers])

    def turn(self, key: Key) -> None:
        """A request of a branch: its prompt, what landed, its output, its end. Or only some of that."""
        rng, pair = self.rng, self.pair
        branch = pair.model.live(*key)
        before = branch.context if branch is not None else chain([], rng.choice(["a", "a" * 20, "ab" * 10]))
        self.requests += 1
        request_id = self.last[key] = f"q{self.requests}"
        prompt = chain(before, rng.choice("ab") * rng.choice([1, 5, 17]))
        assert isinstance(pair.begin(Begin(*key, request_id, new_names=b"".join(prompt)), prompt), BeginKind)
        for phase in Phase:
            if rng.random() < 0.8:
                self.land(key, phase)
        if rng.random() < 0.7:
            self.output(key)
        pair.done(*key, request_id)

    def land(self, key: Key, phase: Phase) -> None:
        """Blocks of a branch's last request land on a node that holds them."""
        branch, node_id = self.pair.model.branches[key], self.rng.choice(list(self.sequences))
        blocks = self.rng.randrange(1, len(branch.context) + 1)
        self.store(node_id, key, blocks)
        self.pair.landed(Landed(*key, self.last[key], 1, phase, node_id, blocks))

    def output(self, key: Key) -> None:
        """A node completes output blocks, which it holds."""
        context, node_id = self.pair.model.branches[key].context, self.rng.choice(list(self.sequences))
        names = chain(context, "z" * self.rng.choice([1, 4]))[len(context) :]
        event = Output(*key, self.last[key], 1, node_id, len(context), b"".join(names))
        if self.pair.output(event):
            self.store(node_id, key, len(context) + len(names))

    def step(self) -> None:
        """Something happens to a branch, or time passes."""
        key = self.rng.choice(KEYS)
        what = self.rng.choice(["turn", "land", "output", "tick", "tick", "end"])
        alive = self.pair.model.live(*key) is not None
        if what == "tick":
            self.pair.advance(0.0, settle=False)
        elif what == "turn" and alive:
            self.turn(key)
        elif what == "land" and alive:
            self.land(key, self.rng.choice(list(Phase)))
        elif what == "output" and alive:
            self.output(key)
        elif what == "end" and self.rng.random() < 0.3:
            self.pair.end(*(key[0], [key[1]]), subtree=False)
        self.agree()

    def turn_nodes(self) -> None:
        """A switch, a loss, or one soon after the other; perhaps while earlier ones are still being taken."""
        if self.rng.random() < 0.5:
            self.pair.advance(0.0, settle=True)
            self.pair.compare()
            self.switched.clear()
        for _ in range(self.rng.choice([1, 2])):
            node_id = self.rng.choice(list(self.sequences))
            if self.rng.random() < 0.6 or len(self.sequences) == 1 or node_id in self.switched:
                self.pair.role_switch(node_id, Role.DECODE, Role.PREFILL, settle=False)
                self.switched.add(node_id)
            else:
                self.pair.node_gone(node_id)
                del self.sequences[node_id]
                if self.rng.random() < 0.5:
                    self.start(node_id)
            self.agree()

    def agree(self) -> None:
        """Counts follow from homes as they are, and the nodes know them."""
        core = self.pair.core
        core.check_invariants()
        for node_id in self.pair.model.nodes:
            kept = {name: count for names, count in core.node_counts(node_id) for name in split_names(names)}
            assert {name: count for name, count in self.pair.pushed[node_id].items() if count} == kept


@pytest.mark.parametrize("rule", DecodeToPrefill)
@pytest.mark.parametrize("seed", range(25))
def test_turns_taken_bit_by_bit_come_to_what_they_would_at_once(seed: int, rule: DecodeToPrefill) -> None:
    """§4.1, role changes: and every event between finds the branch it is of as if all had been done."""
    story = Story(seed, rule)
    story.pair.compare()
    for _ in range(3):
        story.turn_nodes()
        for _ in range(story.rng.choice([0, 3, 12])):
            story.step()
    story.pair.advance(0.0, settle=True)
    story.pair.compare()


def test_a_turn_of_many_branches_is_taken_in_parts() -> None:
    cluster = Cluster("p1", "d1", config=DirectoryConfig(sweep_runs_per_tick=400))
    for number in range(50):
        cluster.serve(f"b{number}", "r1", f"sys{number}", output="out")
    heard = [cluster.switch("d1", Role.DECODE, Role.PREFILL)]
    while (wakeup_s := cluster.directory.next_wakeup_s()) is not None and wakeup_s <= cluster.now_s:
        heard.append(cluster.directory.tick(cluster.now_s))
    updates = [sum(isinstance(effect, CountUpdate) for effect in effects) for effects in heard]
    assert len(updates) > 10
    assert max(updates) < 20
    assert cluster.phase_counts("sys7out") == [(50, 0)] * 3 + [(1, 0)] * 4


def test_what_a_refused_request_made_its_branch_take_is_told_before_what_comes_later() -> None:
    """A node goes by what it hears last, so that may not be the older."""
    cluster = Cluster("d1", "d2", config=DirectoryConfig(sweep_runs_per_tick=1))
    cluster.serve("agent", "r1", "sys", p="d1", d="d1")
    for number in range(50):
        cluster.serve(f"b{number}", "r1", f"other{number}", p="d1", d="d1")
    told: list[CountUpdate] = []

    def hear(effects: list[Effect]) -> None:
        told.extend(
            each for each in effects if isinstance(each, CountUpdate) and each.names == b"".join(chain([], "sys"))
        )

    hear(cluster.switch("d1", Role.DECODE, Role.PREFILL))
    with pytest.raises(NeedFull):
        cluster.directory.begin(0.0, Begin(TENANT, "agent", "r2", base_blocks=2, base_name=bytes(16)))
    hear(cluster.store("d2", "sys"))
    hear(cluster.evict("d2", "sys"))
    assert [(each.node_id, each.elsewhere) for each in told[-2:]] == [("d1", True), ("d1", False)]
    hear(cluster.end("agent"))
    while (wakeup_s := cluster.directory.next_wakeup_s()) is not None and wakeup_s <= cluster.now_s:
        hear(cluster.directory.tick(cluster.now_s))
    assert told[-1].count == 0


# -------------------------------------------------------------------------------------------------------- what was lost


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster("p1", "p2", "d1", config=DirectoryConfig(decode_to_prefill=DecodeToPrefill.RESET))
    cluster.serve("agent", "r1", "sys", output="out")
    return cluster


def test_a_branch_hears_once_why_what_it_counted_is_gone(cluster: Cluster) -> None:
    assert cluster.begin("agent", "r2", "sysout").loss is Loss.NONE
    cluster.directory.node_gone(0.0, "d1")
    assert cluster.begin("agent", "r3", "sysoutmore").loss is Loss.NODE
    assert cluster.begin("agent", "r4", "sysoutmoremore").loss is Loss.NONE
    again = cluster.begin("agent", "r3", "sysoutmore")
    assert (again.kind, again.loss) == (BeginKind.REPLAY, Loss.NODE)


def test_a_switch_that_empties_the_node_is_a_loss_and_one_that_keeps_is_none(cluster: Cluster) -> None:
    cluster.serve("other", "r1", "els", d="p2")
    cluster.switch("d1", Role.DECODE, Role.PREFILL)
    assert cluster.begin("agent", "r2", "sysout").loss is Loss.SWITCH
    assert cluster.begin("other", "r2", "else").loss is Loss.NONE, "it counted nothing there"
    keeping = Cluster("p1", "d1")
    keeping.serve("agent", "r1", "sys", output="out")
    keeping.switch("d1", Role.DECODE, Role.PREFILL)
    assert keeping.begin("agent", "r2", "sysout").loss is Loss.NONE


def test_a_side_request_leaves_the_news_to_the_next_request_of_the_context(cluster: Cluster) -> None:
    cluster.begin("agent", "r2", "sysout")
    cluster.directory.node_gone(0.0, "d1")
    side = cluster.begin("agent", "title", "title")
    assert (side.kind, side.loss) == (BeginKind.SIDE, Loss.NONE)
    assert cluster.begin("agent", "r3", "sysoutmore").loss is Loss.NODE


def test_a_branch_hears_of_a_loss_whose_turn_has_not_reached_it(cluster: Cluster) -> None:
    slow = Cluster("p1", "d1", config=DirectoryConfig(sweep_runs_per_tick=1))
    for number in range(5):
        slow.serve(f"b{number}", "r1", f"sys{number}")
    slow.directory.node_gone(0.0, "d1")
    assert {slow.begin(f"b{number}", "r2", f"sys{number}!").loss for number in range(5)} == {Loss.NODE}
    assert slow.phase_counts("sys1") == [(5, 0)] * 3 + [(1, 0)]


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("cause", [Loss.NODE, Loss.SWITCH])
def test_a_loss_is_heard_of_once_also_after_a_restart(compacted: bool, cause: Loss) -> None:
    """Also one whose turn had not reached the branch."""
    config = DirectoryConfig(decode_to_prefill=DecodeToPrefill.RESET, sweep_runs_per_tick=1)
    cluster, log = Cluster("p1", "d1"), list[LogEntry]()
    cluster.directory = before = Directory(config)
    before.keep_log(log.append)
    for node_id in cluster.sequence:
        before.node_up(0.0, node_id, "life-1")
    for number in range(5):
        cluster.serve(f"b{number}", "r1", f"sys{number}")
    if cause is Loss.NODE:
        before.node_gone(0.0, "d1")
    else:
        cluster.switch("d1", Role.DECODE, Role.PREFILL)
        while before.turning("d1"):
            before.tick(0.0)
    assert cluster.begin("b0", "r2", "sys0!").loss is cause
    restarted = Directory(config)
    for entry in log:
        restarted.replay(entry)
    cluster.directory = Directory.restore(config, restarted.snapshot()) if compacted else restarted
    again, later = cluster.begin("b0", "r2", "sys0!"), cluster.begin("b0", "r3", "sys0!!")
    assert (again.kind, again.loss, later.loss) == (BeginKind.REPLAY, cause, Loss.NONE)
    assert {cluster.begin(f"b{number}", "r2", f"sys{number}!").loss for number in range(1, 5)} == {cause}


def test_an_evicted_block_is_no_loss(cluster: Cluster) -> None:
    cluster.evict("d1", "sysout")
    assert cluster.begin("agent", "r2", "sysout").loss is Loss.NONE
