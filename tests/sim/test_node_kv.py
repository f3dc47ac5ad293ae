"""What a simulated node holds, beside a naive model that keeps every block."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from evolving_sim.node_kv import Branch, Depth, NodeKv

BRANCHES = [Branch(name, f"common {name[0]}", 3 if name[0] == "a" else 0) for name in ("a1", "a2", "b1", "b2")]
ROOM = 20

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["store", "fetch", "rewrite", "drop"]), st.sampled_from(BRANCHES), st.integers(0, 12)),
    max_size=30,
)


def blocks_of(branch: Branch, count: int) -> list[tuple[str, int]]:
    common = [(branch.common_id, i) for i in range(min(count, branch.common_blocks))]
    return common + [(branch.branch_id, i) for i in range(max(0, count - branch.common_blocks))]


class NaiveKv:
    def __init__(self) -> None:
        self.l1: OrderedDict[str, set[tuple[str, int]]] = OrderedDict()  # by owner, the longest unused first
        self.l2: set[tuple[str, int]] = set()

    def depth(self, branch: Branch, count: int) -> Depth:
        in_l1 = set().union(*self.l1.values())
        l1, l2 = (leading(blocks_of(branch, count), tier) for tier in (in_l1, self.l2))
        return Depth(l1, l2)

    def do(self, action: str, branch: Branch, count: int) -> None:
        if action in ("store", "fetch"):
            self.l2 |= set(blocks_of(branch, count))
        if action == "store":
            for owner in (branch.branch_id, branch.common_id):
                self.l1.setdefault(owner, set()).update(b for b in blocks_of(branch, count) if b[0] == owner)
                self.l1.move_to_end(owner)
            while sum(map(len, self.l1.values())) > ROOM:
                self.l1.popitem(last=False)
        if action in ("rewrite", "drop"):
            kept = set(blocks_of(branch, count)) if action == "rewrite" else set()
            gone = {b for b in self.l2 if b[0] == branch.branch_id} - kept
            self.l2 -= gone
            if branch.branch_id in self.l1:
                self.l1[branch.branch_id] -= gone


def leading(blocks: list[tuple[str, int]], tier: set[tuple[str, int]]) -> int:
    return next((i for i, block in enumerate(blocks) if block not in tier), len(blocks))


@given(ACTIONS)
def test_as_a_node_that_keeps_every_block(actions: list[tuple[str, Branch, int]]) -> None:
    kv, naive = NodeKv(ROOM), NaiveKv()
    for action, branch, count in actions:
        match action:
            case "store":
                kv.store(branch, count)
            case "fetch":
                kv.fetch(branch, count)
            case "rewrite":
                kv.rewrite(branch, count)
            case _:
                kv.drop(branch)
        naive.do(action, branch, count)
        kv.check_invariants()
        for each in BRANCHES:
            assert kv.depth(each, 12) == naive.depth(each, 12)
