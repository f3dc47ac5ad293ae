"""How much the blocks of one node's pool are needed, and those that may come to it (§4.1, §4.4).

Needs are given by the name of a block, or by consecutive blocks of contexts; runs say what their blocks are needed, and
are cut where needs differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from evolving.core.blocks import split_names
from evolving.core.eviction import EvictionOrder
from evolving.core.pool_runs import Run, RunTree
from evolving.core.terms import NAME_BYTES, Tier

_Piece = tuple[int, int, int]
"""First block of a run, the one after the last, and their need."""


class PoolNeeds:
    """Sets the needs of runs, and the effective ones of those above them.

    What changes needs returns by how many more blocks L2 has that no branch counts.
    """

    def __init__(self, tree: RunTree, order: EvictionOrder) -> None:
        self._tree = tree
        self._order = order
        self._absent: dict[bytes, int] = {}  # nonzero needs of blocks that are not here; of others, runs say it

    def held(self) -> dict[bytes, int]:
        """Nonzero needs of held blocks."""
        return {name: run.need for run in self._tree.runs if run.need for name in run.names}

    # -- as branches need them

    def set_needs(self, needs: Mapping[bytes, int]) -> int:
        """Say how much blocks are needed; 0 forgets one. Of a block that isn't here it waits for it."""
        names = list(needs)
        pieces: dict[Run, list[_Piece]] = {}
        at = 0
        while at < len(names):
            need, run = needs[names[at]], self._tree.get(names[at])
            if run is None:
                self._await(names[at : at + 1], need)
                at += 1
                continue
            first = last = _position(run, names[at], 1, run.size)
            while at < len(names) and last < run.size and names[at] == run.names[last] and needs[names[at]] == need:
                at += 1
                last += 1
            pieces.setdefault(run, []).append((first, last, need))
        return self._assign(pieces)

    def set_stretches(self, needs: Iterable[tuple[bytes, int]]) -> int:
        """The same of consecutive blocks of contexts, their names joined; of a block that comes twice the last holds.

        Costs the runs concerned, not their blocks.
        """
        pieces: dict[Run, list[_Piece]] = {}
        for names, need in needs:  # of one context, the deepest first as a rule
            blocks, at = len(names) // NAME_BYTES, 0
            while at < blocks:
                name = names[at * NAME_BYTES : (at + 1) * NAME_BYTES]
                run = self._tree.get(name)
                if run is None:  # nor is anything below it
                    self._await(split_names(names[at * NAME_BYTES :]), need)
                    break
                own = pieces.setdefault(run, [])
                first = _position(run, name, blocks - at, own[-1][0] if own else run.size)
                size = _common(run, first, names, at)
                own.append((first, first + size, need))
                at += size
        return self._assign(pieces)

    def forget(self) -> int:
        """All needs are zero, as of blocks that never come."""
        self._absent.clear()
        return self.set_needs(dict.fromkeys(self.held(), 0))

    # -- as blocks come and leave

    def came(self, run: Run) -> int:
        """New blocks came: they get the needs that waited for them."""
        if not self._absent or self._absent.keys().isdisjoint(run.names):
            return 0
        return self._assign({run: [(at, at + 1, self._absent.pop(name, 0)) for at, name in enumerate(run.names)]})

    def leaves(self, run: Run) -> None:
        """A run is about to leave the last tier: its need waits for its blocks."""
        if run.need:
            self._await(run.names, run.need)

    def settle(self, run: Run | None, before: int, after: int) -> None:
        """The effective need of a child of `run` changed, to 0 where it left: bring those above to theirs."""
        while run is not None and before != after:
            own = run.effective
            if after > own:
                run.effective = after
            elif before == own and run.need < own and not any(child.effective == own for child in run.children):
                run.effective = max([run.need, *(child.effective for child in run.children)])
            before, after = own, run.effective
            if before != after:
                self._order.offer(run)
            run = run.parent

    # -- inside

    def _await(self, names: Sequence[bytes], need: int) -> None:
        """A need of blocks that are not here."""
        if need > 0:
            self._absent.update(dict.fromkeys(names, need))
        elif self._absent:
            for name in names:
                self._absent.pop(name, None)

    def _assign(self, pieces: Mapping[Run, Sequence[_Piece]]) -> int:
        """Parts of runs have these needs, later ones before earlier ones: cut the runs where needs differ."""
        renewed: list[Run] = []
        more_zero = 0
        for run, own in pieces.items():
            at = run
            for first, need in reversed(_parts(run, own)):  # from the end on, so that what is left stays one run
                before = None
                if first > 0:
                    before, at = self._tree.split(at, first)
                if at.need != need:
                    if at.tiers & Tier.L2:
                        more_zero += at.size * ((need == 0) - (at.need == 0))
                    self._set_need(at, need)
                    renewed.append(at)
                if before is not None:
                    at = before
        self._order.offer_all(renewed)
        for run in renewed:
            self._tree.merge_near(run)
        return more_zero

    def _set_need(self, run: Run, need: int) -> None:
        own, before = run.need, run.effective
        run.need = need
        if need >= before:
            run.effective = need
        elif own == before:  # else it is a child's, and stays
            run.effective = max([need, *(child.effective for child in run.children)])
        if run.effective != before:
            self.settle(run.parent, before, run.effective)

    def check_invariants(self) -> None:
        """Assert what waits against what is here; walks everything."""
        assert all(need > 0 for need in self._absent.values())
        assert all(self._absent.keys().isdisjoint(run.names) for run in self._tree.runs)


def _parts(run: Run, pieces: Sequence[_Piece]) -> list[tuple[int, int]]:
    """A run's parts by need, once these pieces have theirs: the first block of each, and its need."""
    cuts = sorted({0, run.size, *(piece[0] for piece in pieces), *(piece[1] for piece in pieces)})
    place = {cut: number for number, cut in enumerate(cuts)}
    needs = [run.need] * (len(cuts) - 1)
    for first, last, need in pieces:
        needs[place[first] : place[last]] = [need] * (place[last] - place[first])
    return [(cuts[at], need) for at, need in enumerate(needs) if at == 0 or needs[at - 1] != need]


def _position(run: Run, name: bytes, blocks: int, end: int) -> int:
    """Where a block is in its run; as a rule the first one, or so many `blocks` before `end`."""
    names = run.names
    if names[0] == name:
        return 0
    if blocks <= end and names[end - blocks] == name:
        return end - blocks
    return names.index(name)


def _common(run: Run, first: int, names: bytes, at: int) -> int:
    """How many blocks from `first` of a run on equal names[at:], joined. They agree up to somewhere: bisects."""
    low, high = 0, min(run.size - first, len(names) // NAME_BYTES - at) + 1
    probe = high - 1
    while high - low > 1:
        if names.startswith(run.names[first + probe - 1], (at + probe - 1) * NAME_BYTES):
            low = probe
        else:
            high = probe
        probe = (low + high) // 2
    return low
