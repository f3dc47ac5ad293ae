"""Branch reference counts (§4.1): kept run by run as branches' homes change and as copies come and go.

A run's `homes` says, by node and phase, how many branches have their home of its blocks there. The count of a block on
a node is what its homes sum to for that node, both phases, while the node holds the block in some tier; otherwise 0.
Whatever changes a count yields a `CountUpdate` with the new one; so does what changes whether the pool has the block
without this node: another node's copy in L2, where there was no third.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evolving.core.branches import Branch
from evolving.core.directory_types import CountUpdate, Effect
from evolving.core.homes import HomeMap
from evolving.core.prefix_index import PrefixIndex, Touched
from evolving.core.runs import Run
from evolving.core.terms import NAME_BYTES, Phase, Tier

_KEYS_PER_NODE = 4  # a home key is number * 4 + phase
_PREFILL, _DECODE = int(Phase.PREFILL), int(Phase.DECODE)


@dataclass(slots=True)
class Node:
    """A node that is up. `number` names it in homes for as long as it is up; `bit` marks its copies in the runs, and
    a new one is given whenever it starts over with none; 0: the node is gone."""

    node_id: str
    number: int
    bit: int
    incarnation: str
    last_sequence: int = 0
    resync_asked: bool = False
    resyncing: bool = False
    l1_blocks: int = 0
    l2_blocks: int = 0
    held_blocks: int = 0  # copies with a count above 0


def home_key(number: int, phase: Phase) -> int:
    """The key of a node's homes of a phase in Run.homes."""
    return number * _KEYS_PER_NODE + phase


def count_at(homes: dict[int, int] | None, number: int) -> int:
    """The count that homes give the copies of a node."""
    if homes is None:
        return 0
    base = number * _KEYS_PER_NODE
    return homes.get(base + _PREFILL, 0) + homes.get(base + _DECODE, 0)


class RefCounts:
    """Changes homes of branches and keeps the counts that follow from them."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self.nodes: dict[str, Node] = {}
        self.by_number: dict[int, Node] = {}
        self._last_number = HomeMap.NOBODY
        self.visited_runs = 0  # by changes of homes so far

    # ----------------------------------------------------------------------------------------------------------- nodes

    def add_node(self, node_id: str, incarnation: str) -> Node:
        """A node comes up, holding nothing."""
        self._last_number += 1
        node = Node(node_id, self._last_number, self._index.add_node(node_id), incarnation)
        self.nodes[node_id] = node
        self.by_number[node.number] = node
        return node

    def drop_copies(self, node: Node) -> None:
        """A node holds nothing any more; it knows that itself, so no count is sent."""
        self._index.retire(node.bit)
        node.bit = self._index.add_node(node.node_id)
        node.l1_blocks = node.l2_blocks = node.held_blocks = 0

    def remove_node(self, node: Node) -> None:
        """A node goes. Homes on it count nothing from now on; they have to be left before it is forgotten."""
        self._index.retire(node.bit)
        node.bit = 0
        del self.nodes[node.node_id]

    def forget_node(self, node: Node) -> None:
        """No branch has a home on a removed node any more."""
        del self.by_number[node.number]

    # ---------------------------------------------------------------------------------------------- copies come and go

    def copies_gained(
        self, node: Node, tier: Tier, touched: Sequence[Touched], reason: str, effects: list[Effect]
    ) -> None:
        """A tier of the node got stretches. Where it held them in no tier, their homes there count from now on."""
        for stretch in touched:
            count = count_at(stretch.homes, node.number) if stretch.gained_or_lost else 0
            if count:
                node.held_blocks += len(stretch.names) // NAME_BYTES
                effects.append(CountUpdate(node.node_id, stretch.names, count, stretch.l2 != 0, reason))
            if tier is Tier.L2:
                self._tell_others(stretch, True, "another node has it in L2", effects)

    def copies_lost(
        self, node: Node, tier: Tier, touched: Sequence[Touched], reason: str, effects: list[Effect]
    ) -> None:
        """A tier of the node lost stretches. Where it holds them in no tier any more, their count there is 0."""
        for stretch in touched:
            if stretch.gained_or_lost and count_at(stretch.homes, node.number):
                node.held_blocks -= len(stretch.names) // NAME_BYTES
                effects.append(CountUpdate(node.node_id, stretch.names, 0, False, reason))
            if tier is Tier.L2:
                self._tell_others(stretch, False, "no other node has it in L2", effects)

    def copies_swept(self, touched: Sequence[Touched], effects: list[Effect]) -> None:
        """Copies in L2 of nodes that went, or started over, are no longer there."""
        for stretch in touched:
            self._tell_others(stretch, False, "no other node has it in L2", effects)

    def _tell_others(self, stretch: Touched, elsewhere: bool, reason: str, effects: list[Effect]) -> None:
        """Besides the nodes of a mask, one node has L2 copies or no longer does: that is news to the only one of the
        mask, or, where there is none, to those that hold the stretch in L1."""
        if stretch.l2 & (stretch.l2 - 1):
            return  # two more have it anyway
        for node_id in self._index.nodes_of[stretch.l2 or stretch.l1]:
            count = count_at(stretch.homes, self.nodes[node_id].number)
            if count:
                effects.append(CountUpdate(node_id, stretch.names, count, elsewhere, reason))

    def update(self, node: Node, run: Run, reason: str) -> CountUpdate:
        """What a node that holds a run has to know of it."""
        count = count_at(run.homes, node.number)
        return CountUpdate(node.node_id, run.names, count, self.elsewhere(node, run), reason)

    def elsewhere(self, node: Node, run: Run) -> bool:
        """Whether another node has a run in L2."""
        return run.l2 & self._index.live & ~node.bit != 0

    # ----------------------------------------------------------------------------------------------------------- homes

    def move(
        self, branch: Branch, phase: Phase, first: int, end: int, to: Node | None, reason: str, effects: list[Effect]
    ) -> None:
        """Make `to` (None: nobody) the home of blocks [first, end) of a branch's context in a phase.

        Costs the runs from the context's end up to the first block whose home changes. Raises BrokenChain, and changes
        nothing.
        """
        lowest = self._assign(branch, phase, first, end, to, reason, effects)
        if lowest is not None:
            self._index.merge_up(branch.tip, lowest)

    def _assign(
        self, branch: Branch, phase: Phase, first: int, end: int, to: Node | None, reason: str, effects: list[Effect]
    ) -> int | None:
        """As `move`, and leaves merging to the caller: returns the depth of the first block whose home changed."""
        homes = branch.homes[phase]
        number = HomeMap.NOBODY if to is None else to.number
        changes = [stretch for stretch in homes.stretches(first, end) if stretch[2] != number]
        if not changes:
            return None
        # All cuts come first: one of them may find a broken chain.
        moves = [(old, self.pieces(branch.tip, begin, until)) for begin, until, old in changes]
        for old, runs in moves:
            if old != HomeMap.NOBODY:
                self._leave(runs, self.by_number[old], phase, reason, effects)
            if to is not None:
                self._join(runs, to, phase, reason, effects)
        homes.assign(first, end, number)
        return changes[0][0]

    def leave_node(self, branch: Branch, phase: Phase, node: Node, reason: str, effects: list[Effect]) -> bool:
        """The branch counts nothing on a node in a phase. Returns whether it had a home there."""
        if not branch.homes[phase].has(node.number):
            return False
        for first, end, number in list(branch.homes[phase]):
            if number == node.number:
                self.move(branch, phase, first, end, None, reason, effects)
        return True

    def claim(
        self, branch: Branch, phase: Phase, node: Node, reason: str, effects: list[Effect]
    ) -> list[tuple[int, int]]:
        """Blocks of a branch's context without a home in a phase, that the node holds in L2, get it as their home;
        returns them as (first, end)."""
        held: list[tuple[int, int]] = []
        for first, end, number in branch.homes[phase].stretches(0, branch.blocks):
            if number == HomeMap.NOBODY:
                pieces = self.pieces(branch.tip, first, end)
                held += [(run.start, run.start + run.size) for run in pieces if run.l2 & node.bit]
        for first, end in held:
            self.move(branch, phase, first, end, node, reason, effects)
        return held

    def pieces(self, tip: Run | None, first: int, end: int) -> list[Run]:
        """The runs of a path that make up exactly the blocks [first, end), deepest first; cut out at both ends. Raises
        BrokenChain."""
        run = self._run_before(tip, end)
        if run.start + run.size > end:
            run = self._index.split(run, end - run.start)
        runs = [run]
        while run.start > first:
            assert run.parent is not None
            run = run.parent
            runs.append(run)
        if run.start < first:
            self._index.split(run, first - run.start)
        self.visited_runs += len(runs)
        return runs

    @staticmethod
    def _run_before(tip: Run | None, end: int) -> Run:
        """The run on a path with block end - 1."""
        run = tip
        while run is not None and run.start >= end:
            run = run.parent
        assert run is not None
        return run

    def _join(self, runs: list[Run], node: Node, phase: Phase, reason: str, effects: list[Effect]) -> None:
        """One more branch has its home of these runs there."""
        key = home_key(node.number, phase)
        number, bit = node.number, node.bit
        others = self._index.live & ~bit
        watched = self._index.visits
        for run in runs:
            homes = run.homes
            if watched:
                self._index.mark_changed(run)
            if homes is None:
                homes = run.homes = {key: 1}
            else:
                homes[key] = homes.get(key, 0) + 1
            if (run.l1 | run.l2) & bit:
                count = count_at(homes, number)
                if count == 1:
                    node.held_blocks += run.size
                effects.append(CountUpdate(node.node_id, run.names, count, run.l2 & others != 0, reason))

    def _leave(self, runs: list[Run], node: Node, phase: Phase, reason: str, effects: list[Effect]) -> None:
        """One branch less has its home of these runs there."""
        key = home_key(node.number, phase)
        number, bit = node.number, node.bit
        others = self._index.live & ~bit
        watched = self._index.visits
        for run in runs:
            homes = run.homes
            assert homes is not None
            if watched:
                self._index.mark_changed(run)
            if homes[key] > 1:
                homes[key] -= 1
            elif len(homes) > 1:
                del homes[key]
            else:
                homes = run.homes = None
            if (run.l1 | run.l2) & bit:
                count = count_at(homes, number) if homes else 0
                if count == 0:
                    node.held_blocks -= run.size
                effects.append(CountUpdate(node.node_id, run.names, count, run.l2 & others != 0, reason))

    # --------------------------------------------------------------------------------------------------------- contexts

    def set_context(
        self, branch: Branch, tip: Run | None, blocks: int, keep: int, reason: str, effects: list[Effect]
    ) -> None:
        """Give a branch another context: `blocks` blocks that end with the run `tip`. The first `keep` of them are
        those of the old one and keep their homes."""
        if keep < branch.blocks:
            for phase, homes in branch.homes.items():
                if homes.end() > keep:
                    self._assign(branch, phase, keep, homes.end(), None, reason, effects)
            for request in branch.requests.values():
                request.valid_blocks = min(request.valid_blocks, keep)
        if tip is not None:
            tip.tips += 1  # before the old one goes, so that nothing both contexts need is deleted
        old = branch.tip
        branch.tip = tip
        branch.blocks = blocks
        if old is not None:
            old.tips -= 1
            self._index.prune(old)
            if old.size and old is not tip:
                self._index.merge_up(old, keep)
