"""One simulated node: iterations, chunks, slots, and how long one waits there."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim.naive_node import Answer, Prompt, play

from evolving.core.directory_types import Match
from evolving.core.pool_runs import Use
from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients
from evolving.core.work import PrefillWork, query_key_pairs
from evolving_sim.contexts import BlockNames
from evolving_sim.events import EventHeap, Priority
from evolving_sim.kv import NodeKv
from evolving_sim.legs import DecodeLeg, PrefillLeg, Request
from evolving_sim.node_config import BothPhases, NodeConfig
from evolving_sim.sim_node import NodeCallbacks, SimNode

PREFILL = PrefillCoefficients(c0_s=0.25, c1_s=0.01, c2_s=1e-4)
SLOW = NodeConfig(
    PREFILL,
    DecodeCoefficients(0.1, 0.3, 0.05, 1e-3, experts_per_token=2, experts=8),
    accepted_tokens=2.0,
    chunk_tokens=64,
    decode_slots=3,
)


class OneNode:
    """A node by itself: what it says is noted with the time."""

    def __init__(self, config: NodeConfig, *, fetches_at_start: bool = False) -> None:
        self.events = EventHeap()
        self.config = config
        self.done_s: dict[str, float] = {}
        self.taken: list[str] = []
        self.fetching: list[str] = []
        callbacks = NodeCallbacks(
            fetch=self._fetch,
            taken=lambda leg: self.taken.append(leg.request.request_id),
            prefilled=self._prefilled,
            granted=lambda _: None,
            decoded=lambda leg: self._done(leg.request),
        )
        self.node = SimNode("n", config, self.events, callbacks, NodeKv(config), fetches_at_start)

    def _fetch(self, leg: PrefillLeg) -> None:
        leg.fetch_begun = True
        self.fetching.append(leg.request.request_id)

    def _done(self, request: Request) -> None:
        self.done_s[request.request_id] = self.events.now_s

    def _prefilled(self, leg: PrefillLeg) -> None:
        self._done(leg.request)
        self.node.drop(leg)

    def prompt(self, name: str, tokens: int) -> PrefillLeg:
        request = self.request(name, tokens, 10)
        return PrefillLeg(request, 1, "n", tokens, Match(), (), self.node.kv.leg(request.names, Use.PREFILL), 0, 0)

    def request(self, name: str, prompt: int, output: int) -> Request:
        names = BlockNames(name, self.config.block_tokens)
        names.grow(prompt + output)
        return Request(name, "kind", name, name, "", 1, names.names, 0, prompt, output, 0.0, lambda: None)

    def enqueue(self, leg: PrefillLeg) -> None:
        self.node.enqueue(leg, PrefillWork(leg.uncached_tokens, leg.cached_tokens, leg.restored_tokens))

    def answer(self, name: str, iterations: int, context: int) -> None:
        """Whose first iteration has `context` tokens."""
        request = self.request(name, context - 1, 2 * iterations + 1)
        prefill = PrefillLeg(request, 1, "other", context - 1, Match(), (), self.node.kv.leg((), Use.PREFILL), 0, 0)
        prefill.prefilled = True
        leg = DecodeLeg(request, prefill, iterations, 2.0, "n")
        leg.kv = self.node.kv.leg(request.names, Use.DECODE)
        self.node.reserve(leg)
        if leg.granted:
            self.node.join(leg)

    def run(self, end_s: float = 1e6) -> None:
        self.events.after_each = self.node.check_invariants
        self.events.run_until(end_s)


TIMES = st.integers(0, 30_000).map(lambda value: value / 1000)
PROMPTS = st.lists(st.tuples(TIMES, st.integers(1, 300)), max_size=6)
ANSWERS = st.lists(st.tuples(TIMES, st.integers(1, 40), st.integers(2, 500)), max_size=8)


@given(PROMPTS, ANSWERS, st.sampled_from(BothPhases), st.sampled_from([0.0, 1e-3]))
def test_iterations_end_where_playing_each_by_itself_puts_them(
    prompts: list[tuple[float, int]], answers: list[tuple[float, int, int]], both: BothPhases, d3_s: float
) -> None:
    """Counting iterations in which nothing changes is exact, whatever comes in between (§4.2, equations 1 and 2)."""
    config = NodeConfig(
        PREFILL,
        DecodeCoefficients(0.1, 0.3, 0.05, d3_s, experts_per_token=2, experts=8),
        tokens_per_request=3.0,
        accepted_tokens=2.0,
        chunk_tokens=64,
        both_phases=both,
    )
    one = OneNode(config)
    # Nothing comes at the very end of an iteration, where rounding would decide what it takes along.
    prompts = [(at_s + 1.3e-6 * (i + 1), tokens) for i, (at_s, tokens) in enumerate(prompts)]
    answers = [(at_s + 0.7e-6 + 1.3e-6 * i, count, context) for i, (at_s, count, context) in enumerate(answers)]
    for i, (at_s, tokens) in enumerate(prompts):
        one.events.at(at_s, Priority.ARRIVAL, partial(one.enqueue, one.prompt(f"p{i}", tokens)))
    for i, (at_s, iterations, context) in enumerate(answers):
        one.events.at(at_s, Priority.ARRIVAL, partial(one.answer, f"a{i}", iterations, context))
    one.run()
    naive = play(
        config,
        [Prompt(f"p{i}", at_s, tokens) for i, (at_s, tokens) in enumerate(prompts)],
        [Answer(f"a{i}", at_s, *rest) for i, (at_s, *rest) in enumerate(answers)],
    )
    assert one.done_s == pytest.approx(naive, abs=1e-6)
    assert one.node.idle


def test_what_comes_at_one_moment_shares_an_iteration() -> None:
    one = OneNode(SLOW)
    for i in range(3):
        one.events.at(1.0, Priority.ARRIVAL, partial(one.enqueue, one.prompt(f"p{i}", 10)))
    one.run()
    assert len(set(one.done_s.values())) == 1


def test_slots_are_given_in_order_and_a_full_node_has_none_free() -> None:
    one = OneNode(SLOW)
    for i in range(5):
        one.answer(f"a{i}", 4, 10)
    assert (one.node.slots_free, one.node.decoding, len(one.node.waiting)) == (0, 3, 2)
    one.run()
    assert [leg.request.request_id for leg in one.node.granted] == ["a3", "a4"]
    assert len({one.done_s[f"a{i}"] for i in range(3)}) == 1


def test_a_leg_waits_for_device_memory_others_have() -> None:
    config = NodeConfig(PREFILL, SLOW.decode, l1_tokens=200, block_tokens=1)
    one = OneNode(config)
    one.answer("first", 3, 60)
    one.answer("second", 3, 60)
    assert one.node.memory_tokens < 0
    assert one.node.decoding == 1
    one.run()
    assert one.node.decoding == 1
    assert "second" not in one.done_s  # has its room now; its KV is still to come


@pytest.mark.parametrize("decoding", [0, 2])
def test_how_long_one_waits_goes_by_the_legs_and_the_batch_beside_them(decoding: int) -> None:
    """Equation 7's first two terms. What runs has restored and read what it reuses."""
    prefill = PrefillCoefficients(c0_s=0.25, c1_s=0.01, c2_s=1e-4, c3_s=1e-3, c4_s=1e-3)
    one = OneNode(NodeConfig(prefill, SLOW.decode, accepted_tokens=2.0, chunk_tokens=64))
    for i in range(decoding):
        one.answer(f"a{i}", 100, 10)
    running, queued = one.prompt("running", 164), one.prompt("queued", 90)
    one.node.kv.pool.store(running.kv.names, 0, 1)
    queued.cached_tokens = queued.restored_tokens = 64
    one.enqueue(running)
    one.enqueue(queued)
    one.run(0.0)
    assert (one.node.running, one.node.queue) == ([running], [queued])
    assert (running.cached_tokens, running.restored_tokens) == (64, 64)
    runs_s = 0.25 * 100 / 64 + 0.01 * 100 + 1e-4 * query_key_pairs(100, 64)
    queued_s = 0.25 + 0.01 * 26 + 1e-4 * query_key_pairs(26, 64) + 1e-3 * 64 + 1e-3 * 64
    beside_s = 126 / 64 * SLOW.decode.decode_iteration_s(2, 20) if decoding else 0.0
    assert one.node.wait_s == pytest.approx(runs_s + queued_s + beside_s)


def fetching(one: OneNode) -> PrefillLeg:
    """A prompt whose first block peers have."""
    leg = one.prompt("fetching", 100)
    leg.cached_tokens = leg.restored_tokens = leg.coming_tokens = 64
    leg.fetch_until_blocks, leg.fetch_over = 1, False
    one.enqueue(leg)
    return leg


def arrive(one: OneNode, leg: PrefillLeg) -> None:
    one.node.kv.pool.store(leg.kv.names, 0, 1)
    one.node.came(leg, 1)
    one.node.fetched(leg)


def test_a_prompt_whose_fetch_goes_on_is_passed_over() -> None:
    """§4.4: one fetch never blocks another request."""
    one = OneNode(SLOW)
    leg = fetching(one)
    one.enqueue(one.prompt("other", 10))
    one.run(0.0)
    assert one.taken == ["other"]
    assert one.fetching == []
    arrive(one, leg)
    one.run()
    assert one.taken == ["other", "fetching"]
    assert (leg.cached_tokens, leg.restored_tokens, leg.computed_tokens) == (64, 64, 36)


def test_where_fetches_begin_with_a_prompts_turn_nobody_passes_it() -> None:
    """§2.3: the time of the fetch adds to prefill."""
    one = OneNode(SLOW, fetches_at_start=True)
    leg = fetching(one)
    one.enqueue(one.prompt("other", 10))
    one.run(5.0)
    assert one.fetching == ["fetching"]
    assert one.taken == []
    arrive(one, leg)
    one.run()
    assert one.taken == ["fetching", "other"]


def test_what_waits_in_host_memory_for_its_turn_is_not_evicted() -> None:
    one = OneNode(NodeConfig(PREFILL, SLOW.decode, block_tokens=1, l2_tokens=100, chunk_tokens=64))
    leg = one.prompt("waits", 60)
    one.node.kv.pool.store(leg.kv.names, 0, 40)
    leg.fetch_until_blocks = 40
    one.enqueue(leg)
    other = one.request("other", 90, 1)
    assert one.node.kv.pool.store(other.names, 0, 90) == 60
    one.run()
    assert leg.cached_tokens == 40
