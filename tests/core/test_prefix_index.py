"""The prefix index: its moves, what it says of copies and depths, and a long random life beside a naive index."""

from __future__ import annotations

import random

import pytest

from evolving.core.blocks import split_names
from evolving.core.directory_types import HolderRun, Match, NodeDepth, RunRef
from evolving.core.errors import BrokenChain, InvalidArgument
from evolving.core.prefix_index import PrefixIndex, UnknownParent, check_run
from evolving.core.runs import Run
from evolving.core.terms import ANCHOR_BLOCKS, NAME_BYTES, Tier


def fresh(rng: random.Random, blocks: int) -> bytes:
    """Names nobody had before."""
    return rng.randbytes(blocks * NAME_BYTES)


def ref(names: bytes, first: int, end: int) -> RunRef:
    """Blocks [first, end) of a context, as a node names them."""
    start = 0 if first == 0 else (first - 1) // ANCHOR_BLOCKS * ANCHOR_BLOCKS
    return RunRef(start, names[start * NAME_BYTES : end * NAME_BYTES], first - start)


@pytest.fixture
def rng() -> random.Random:
    return random.Random(1)


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(run_blocks_max=64)


# ------------------------------------------------------------------------------------------------------------ matching


def test_depths_are_per_tier_and_stop_at_the_first_hole(index: PrefixIndex, rng: random.Random) -> None:
    names = fresh(rng, 40)
    a, b = index.add_node("a"), index.add_node("b")
    index.add_copies(a, Tier.L2, ref(names, 0, 30))
    index.add_copies(a, Tier.L1, ref(names, 0, 10))
    index.add_copies(a, Tier.L1, ref(names, 12, 40))
    index.add_copies(b, Tier.L2, ref(names, 5, 40))
    match = index.match(names + fresh(rng, 3))
    assert match.blocks == 43
    assert match.nodes == {"a": NodeDepth(l1_blocks=10, l2_blocks=30, either_blocks=40)}
    assert match.pool_blocks == match.any_blocks == 40
    assert match.holders == (
        HolderRun(0, 5, ("a",), ("a",)),
        HolderRun(5, 5, ("a",), ("a", "b")),
        HolderRun(10, 2, (), ("a", "b")),
        HolderRun(12, 18, ("a",), ("a", "b")),
        HolderRun(30, 10, ("a",), ("b",)),
    )


def test_the_pool_is_host_memory(index: PrefixIndex, rng: random.Random) -> None:
    names = fresh(rng, 20)
    a = index.add_node("a")
    index.add_copies(a, Tier.L1, ref(names, 0, 20))
    index.add_copies(a, Tier.L2, ref(names, 0, 7))
    match = index.match(names)
    assert (match.pool_blocks, match.any_blocks) == (7, 20)


def test_a_run_nobody_holds_lies_between_holders_without_nodes(index: PrefixIndex, rng: random.Random) -> None:
    names = fresh(rng, 50)
    a = index.add_node("a")
    index.add_copies(a, Tier.L2, ref(names, 0, 50))
    index.remove_copies(a, Tier.L2, ref(names, 10, 20))
    assert index.match(names).holders == (
        HolderRun(0, 10, (), ("a",)),
        HolderRun(10, 10, (), ()),
        HolderRun(20, 30, (), ("a",)),
    )
    assert index.match(names).pool_blocks == 10


def test_a_context_that_leaves_another_midway_matches_what_they_share(index: PrefixIndex, rng: random.Random) -> None:
    names = fresh(rng, 50)
    a = index.add_node("a")
    index.add_copies(a, Tier.L2, ref(names, 0, 50))
    for shared in (0, 1, 15, 16, 17, 31, 32, 49, 50):
        other = names[: shared * NAME_BYTES] + fresh(rng, 5)
        assert index.match(other).pool_blocks == shared


def test_an_empty_index_and_an_empty_context_match_nothing(index: PrefixIndex, rng: random.Random) -> None:
    assert index.match(b"") == Match()
    assert index.match(fresh(rng, 3)) == Match(blocks=3)


def test_a_match_stays_what_it_was(index: PrefixIndex, rng: random.Random) -> None:
    names = fresh(rng, 5)
    a = index.add_node("a")
    index.add_copies(a, Tier.L2, ref(names, 0, 5))
    match = index.match(names)
    index.retire(a)
    index.sweep(1000)
    assert index.add_node("b") == a  # the slot is used again
    assert match.holders == (HolderRun(0, 5, (), ("a",)),)


# ------------------------------------------------------------------------------------------------- what nodes announce


def test_a_run_below_an_unknown_block_is_refused(index: PrefixIndex, rng: random.Random) -> None:
    names = fresh(rng, 40)
    a = index.add_node("a")
    with pytest.raises(UnknownParent):
        index.add_copies(a, Tier.L2, ref(names, 20, 30))
    index.add_copies(a, Tier.L2, ref(names, 0, 18))
    with pytest.raises(UnknownParent):
        index.add_copies(a, Tier.L2, ref(names, 20, 30))
    index.add_copies(a, Tier.L2, ref(names, 18, 30))
    assert index.match(names).pool_blocks == 30
    index.check_invariants()


def test_a_run_below_another_continuation_of_the_same_depth_is_refused(index: PrefixIndex, rng: random.Random) -> None:
    names = fresh(rng, 19)
    a = index.add_node("a")
    index.add_copies(a, Tier.L2, ref(names, 0, 19))
    other = names[: 17 * NAME_BYTES] + fresh(rng, 10)
    with pytest.raises(UnknownParent):
        index.add_copies(a, Tier.L2, ref(other, 19, 27))
    assert index.match(names).pool_blocks == 19
    assert index.match(other).pool_blocks == 17
    index.check_invariants()


def test_a_run_named_from_its_context_start_may_have_holes_above(index: PrefixIndex, rng: random.Random) -> None:
    names = fresh(rng, 40)
    a = index.add_node("a")
    index.add_copies(a, Tier.L2, RunRef(0, names, 35))
    assert index.match(names).holders == (HolderRun(0, 35, (), ()), HolderRun(35, 5, (), ("a",)))
    index.check_invariants()
    index.remove_copies(a, Tier.L2, RunRef(0, names, 35))
    assert index.run_count == 0


def test_what_was_never_held_can_be_removed(index: PrefixIndex, rng: random.Random) -> None:
    names = fresh(rng, 40)
    a, b = index.add_node("a"), index.add_node("b")
    index.add_copies(a, Tier.L2, ref(names, 0, 20))
    assert index.remove_copies(b, Tier.L2, ref(names, 0, 40)).blocks == 0
    assert index.remove_copies(a, Tier.L1, ref(names, 0, 40)).blocks == 0
    assert index.remove_copies(a, Tier.L2, ref(names, 30, 40)).blocks == 0
    assert index.remove_copies(a, Tier.L2, ref(names, 15, 40)).blocks == 5
    index.check_invariants()


@pytest.mark.parametrize(
    "run",
    [
        RunRef(0, b"", 0),
        RunRef(0, bytes(15), 0),
        RunRef(0, bytes(16), 1),
        RunRef(8, bytes(16), 0),
        RunRef(-16, bytes(16), 0),
        RunRef(16, bytes(32), -1),
    ],
)
def test_what_is_no_run_is_refused(run: RunRef) -> None:
    with pytest.raises(InvalidArgument):
        check_run(run)


def test_a_name_under_two_parents_is_no_digest(index: PrefixIndex, rng: random.Random) -> None:
    names = fresh(rng, 32)
    a = index.add_node("a")
    index.add_copies(a, Tier.L2, ref(names, 0, 32))
    moved = fresh(rng, 16) + names
    with pytest.raises(BrokenChain):
        index.add_copies(a, Tier.L2, ref(moved, 0, 48))
    with pytest.raises(BrokenChain):
        index.match(names[16 * NAME_BYTES :] + names)
    twice = fresh(rng, 1) * 3
    index.add_copies(a, Tier.L1, ref(twice, 0, 3))
    with pytest.raises(BrokenChain):
        index.remove_copies(a, Tier.L1, ref(twice, 1, 2))
    index.check_invariants()


# ----------------------------------------------------------------------------------------------------- runs and memory


def test_alike_neighbours_are_one_run_and_unlike_ones_are_not(index: PrefixIndex, rng: random.Random) -> None:
    names = fresh(rng, 48)
    a = index.add_node("a")
    for first in (0, 16, 32):
        index.add_copies(a, Tier.L2, ref(names, first, first + 16))
    assert index.run_count == 1
    index.add_copies(a, Tier.L1, ref(names, 20, 30))
    assert index.run_count == 3
    index.remove_copies(a, Tier.L1, ref(names, 20, 30))
    index.merge_up(index.path(index.deepest(None, 0, names)[0])[-1])
    assert index.run_count == 1


def test_a_run_is_never_longer_than_allowed(rng: random.Random) -> None:
    index = PrefixIndex(run_blocks_max=10)
    a = index.add_node("a")
    names = fresh(rng, 95)
    index.add_copies(a, Tier.L2, ref(names, 0, 95))
    index.check_invariants()
    assert index.run_count == 10
    assert index.match(names).pool_blocks == 95


def test_nothing_is_left_when_all_copies_are_gone(index: PrefixIndex, rng: random.Random) -> None:
    a = index.add_node("a")
    names = fresh(rng, 100)
    for depth in (10, 33, 70):
        branched = names[: depth * NAME_BYTES] + fresh(rng, 20)
        index.add_copies(a, Tier.L2, ref(branched, 0, depth + 20))
    index.clear_tier(a, Tier.L2)
    assert (index.run_count, index.block_count) == (0, 0)
    assert index.indexed(names[:NAME_BYTES]) is None


def test_a_lost_nodes_copies_mean_nothing_at_once_and_are_swept_in_slices(rng: random.Random) -> None:
    index = PrefixIndex(run_blocks_max=4)
    a, b = index.add_node("a"), index.add_node("b")
    names = fresh(rng, 40)
    index.add_copies(a, Tier.L2, ref(names, 0, 40))
    index.add_copies(b, Tier.L2, ref(names, 0, 20))
    index.retire(a)
    assert index.match(names).nodes == {"b": NodeDepth(0, 20, 20)}
    assert index.match(names).pool_blocks == 20
    c = index.add_node("c")
    assert c not in (a, b)  # not before the sweep is over
    slices = 0
    while index.retired:
        index.sweep(runs_max=3)
        slices += 1
    assert slices > 1
    index.check_invariants()
    assert index.block_count == 20
    assert index.add_node("d") == a


# ---------------------------------------------------------------------------------------------------------------- life


def prefix_length(nodes: list[set[str]]) -> int:
    """Leading blocks that some node holds."""
    return next((at for at, holding in enumerate(nodes) if not holding), len(nodes))


class Naive:
    """Every block on its own: who holds it, and which context it ends."""

    def __init__(self) -> None:
        self.held: dict[Tier, dict[bytes, set[str]]] = {Tier.L1: {}, Tier.L2: {}}

    def nodes(self, name: bytes, tier: Tier) -> set[str]:
        return self.held[tier].setdefault(name, set())

    def add(self, node: str, tier: Tier, names: list[bytes]) -> int:
        new = [name for name in names if node not in self.nodes(name, tier)]
        for name in new:
            self.nodes(name, tier).add(node)
        return len(new)

    def remove(self, node: str, tier: Tier, names: list[bytes]) -> int:
        lost = [name for name in names if node in self.nodes(name, tier)]
        for name in lost:
            self.nodes(name, tier).discard(node)
        return len(lost)

    def clear(self, node: str, tier: Tier) -> int:
        return self.remove(node, tier, list(self.held[tier]))

    def check(self, names: list[bytes], match: Match) -> None:
        """A match says just what the blocks say one by one."""

        l1 = [self.nodes(name, Tier.L1) for name in names]
        l2 = [self.nodes(name, Tier.L2) for name in names]
        either = [one | other for one, other in zip(l1, l2, strict=True)]
        assert match.blocks == len(names)
        assert match.pool_blocks == prefix_length(l2)
        assert match.any_blocks == prefix_length(either)
        assert match.nodes == {
            node: NodeDepth(*(prefix_length([nodes & {node} for nodes in each]) for each in (l1, l2, either)))
            for node in (either[0] if either else ())
        }
        at = 0
        for run in match.holders:
            assert run.first_block == at
            for depth in range(at, at + run.blocks):
                assert (set(run.l1_nodes), set(run.l2_nodes)) == (l1[depth], l2[depth])
            at += run.blocks
        assert not any(either[at:])


class Life:
    """Random events on an index and a naive one: copies of nodes, and branch tips that keep blocks."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.index = PrefixIndex(run_blocks_max=self.rng.choice([3, 16, 40, 256]))
        self.naive = Naive()
        self.contexts: list[bytes] = []
        self.bits: dict[str, int] = {}
        self.tips: list[tuple[Run, bytes]] = []
        self.lives = 0

    def context(self) -> bytes:
        """A context: new, an earlier one, or one that branches off it."""
        rng = self.rng
        base = rng.choice(self.contexts) if self.contexts and rng.random() < 0.85 else b""
        if rng.random() < 0.5:
            base = base[: rng.randrange(len(base) // NAME_BYTES + 1) * NAME_BYTES]
        names = base + fresh(rng, rng.choice([0, 1, 3, 15, 16, 17, 40]))
        if names:
            self.contexts.append(names)
        return names

    def node(self) -> str:
        """A node that is up; some come and go."""
        if len(self.bits) < 4:
            self.lives += 1
            self.bits[f"node-{self.lives}"] = self.index.add_node(f"node-{self.lives}")
        return self.rng.choice(list(self.bits))

    def copies(self) -> None:
        rng, names, node = self.rng, self.context(), self.node()
        if not names:
            return
        end = rng.randrange(len(names) // NAME_BYTES) + 1
        first = rng.choice([0, rng.randrange(end)])
        run = ref(names, first, end) if rng.random() < 0.8 else RunRef(0, names[: end * NAME_BYTES], first)
        tier = rng.choice(list(Tier))
        meant = split_names(names)[first:end]
        if rng.random() < 0.45:
            assert self.index.remove_copies(self.bits[node], tier, run).blocks == self.naive.remove(node, tier, meant)
            return
        try:
            assert self.index.add_copies(self.bits[node], tier, run).blocks == self.naive.add(node, tier, meant)
        except UnknownParent:
            assert run.first_block > 0
            before = split_names(names)[:first]
            assert self.index.deepest(None, 0, b"".join(before))[1] < len(before)

    def tip(self) -> None:
        names = self.context()
        run, depth = self.index.deepest(None, 0, names)
        rest = names[depth * NAME_BYTES :]
        end = self.index.extend(run, depth, rest)
        if end is not None:
            end.tips += 1
            self.tips.append((end, names))

    def drop_tip(self) -> None:
        if self.tips:
            run, _ = self.tips.pop(self.rng.randrange(len(self.tips)))
            run.tips -= 1
            self.index.prune(run)
            if run.size:
                self.index.merge(run)

    def step(self) -> None:
        roll = self.rng.random()
        if roll < 0.7:
            self.copies()
        elif roll < 0.8:
            self.tip()
        elif roll < 0.88:
            self.drop_tip()
        elif roll < 0.91:
            node, tier = self.node(), self.rng.choice(list(Tier))
            assert self.index.clear_tier(self.bits[node], tier).blocks == self.naive.clear(node, tier)
        elif roll < 0.94:
            node = self.node()
            self.index.retire(self.bits.pop(node))
            for tier in Tier:
                self.naive.clear(node, tier)
        else:
            self.index.sweep(self.rng.choice([1, 5, 100]))

    def blocks(self) -> set[bytes]:
        return {name for run in self.index.runs() for name in split_names(run.names)}

    def check(self) -> None:
        self.index.check_invariants()
        for run, names in self.tips:
            assert b"".join(part.names for part in self.index.path(run)) == names
        names = self.context()
        self.naive.check(split_names(names), self.index.match(names))
        assert self.index.deepest(None, 0, names) == self.index.walk(None, 0, names)


@pytest.mark.parametrize("seed", range(12))
def test_a_random_life_beside_a_naive_index(seed: int) -> None:
    life = Life(seed)
    for _ in range(300):
        life.step()
        life.check()
    for node in list(life.bits):
        life.index.retire(life.bits.pop(node))
    while life.tips:
        life.drop_tip()
    while life.index.retired:
        life.index.sweep(7)
    assert (life.index.run_count, life.index.block_count) == (0, 0)


@pytest.mark.parametrize("seed", range(40))
def test_a_visit_meets_every_block_that_stays_whatever_happens_between_its_parts(seed: int) -> None:
    life = Life(seed)
    for _ in range(60):
        life.step()
    stayed = life.blocks()
    met: set[bytes] = set()
    with life.index.visit() as visit:
        while not visit.over:
            for run in visit.take(life.rng.choice([1, 2, 5])):
                assert run.size
                met.update(split_names(run.names))
            for _ in range(life.rng.randrange(4)):
                life.step()
                stayed &= life.blocks()
    assert stayed <= met
    assert visit not in life.index.visits
