"""A long random life of the prefix index beside a naive one."""

from __future__ import annotations

import random

import pytest
from core.naming import fresh, ref

from evolving.core.blocks import split_names
from evolving.core.directory_types import Match, NodeDepth, RunRef
from evolving.core.prefix_index import PrefixIndex, UnknownParent
from evolving.core.runs import Run
from evolving.core.terms import NAME_BYTES, Tier


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
