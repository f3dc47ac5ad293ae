"""Which node holds which block in which tier, over the run tree; and how far into a context each node's copies reach.

A node is a *slot*: one bit in the runs' L1 and L2 masks. When a node goes, or starts anew, its slot is retired: its
bits mean nothing from then on, and `sweep` clears them from the runs in slices before the slot is used again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from evolving.core.directory_types import Match, NodeDepth, RunRef, Stretch
from evolving.core.errors import BrokenChain, InvalidArgument
from evolving.core.runs import Run, RunTree, Visit, common_blocks
from evolving.core.terms import ANCHOR_BLOCKS, NAME_BYTES, Tier

_MASK_CACHE_MAX = 4096


class UnknownParent(Exception):
    """A run hangs under a block that is not in the index: the sender has to say everything it holds."""


class Touched(NamedTuple):
    """A stretch with homes of which a node got a copy, or lost one."""

    names: bytes
    homes: dict[int, int]
    gained_or_lost: bool  # the node has it in no other tier: now it holds the stretch, or no longer does
    l1: int  # other nodes' copies, as masks
    l2: int


class Change(NamedTuple):
    """What an event of a node changed: blocks of the tier added or removed, and stretches whose counts it touches."""

    blocks: int
    touched: Sequence[Touched]


NO_CHANGE = Change(0, ())


def check_names(names: bytes) -> int:
    """Number of names. Raises InvalidArgument when they are not 16 bytes each."""
    if len(names) % NAME_BYTES:
        raise InvalidArgument(f"names must be {NAME_BYTES} bytes each, got {len(names)} bytes")
    return len(names) // NAME_BYTES


def check_run(ref: RunRef) -> None:
    """Raise InvalidArgument unless `ref` can be a run."""
    blocks = check_names(ref.names)
    if ref.first_block < 0 or ref.first_block % ANCHOR_BLOCKS:
        raise InvalidArgument(f"first_block must be a multiple of {ANCHOR_BLOCKS}, got {ref.first_block}")
    if not 0 <= ref.skip < blocks:
        raise InvalidArgument(f"a run of {blocks} blocks can't skip {ref.skip}")


class _NodesOf(dict[int, tuple[str, ...]]):
    """mask -> node ids of its live bits, in slot order; made when first asked for."""

    def __init__(self, slots: list[str | None]) -> None:
        super().__init__()
        self._slots = slots

    def __missing__(self, mask: int) -> tuple[str, ...]:
        if len(self) >= _MASK_CACHE_MAX:
            self.clear()
        found = [node for slot, node in enumerate(self._slots) if mask >> slot & 1 and node is not None]
        nodes = self[mask] = tuple(found)
        return nodes


class PrefixIndex(RunTree):
    """The run tree with copies."""

    def __init__(self, run_blocks_max: int = 256) -> None:
        super().__init__(run_blocks_max)
        self._slots: list[str | None] = []  # slot -> node id; None: free, retired or being swept
        self._slots_seen: tuple[str | None, ...] = ()  # a copy that matches can keep
        self.nodes_of = _NodesOf(self._slots)
        self.live = 0  # bits of all nodes
        self._sweeping = 0  # retired bits the sweep in progress clears
        self._sweep: Visit | None = None

    # ----------------------------------------------------------------------------------------------------------- slots

    def add_node(self, node_id: str) -> int:
        """Give a node a slot; returns its bit."""
        slot = next((s for s in range(len(self._slots)) if not (self.live | self.retired) >> s & 1), len(self._slots))
        if slot == len(self._slots):
            self._slots.append(None)
        self._slots[slot] = node_id
        self.live |= 1 << slot
        self._slots_changed()
        return 1 << slot

    def retire(self, bit: int) -> None:
        """All copies of the node with this bit are gone."""
        assert self.live & bit
        self._slots[bit.bit_length() - 1] = None
        self.live &= ~bit
        self.retired |= bit
        self._slots_changed()

    def _slots_changed(self) -> None:
        self._slots_seen = tuple(self._slots)
        self.nodes_of.clear()

    def sweep(self, runs_max: int) -> Sequence[Touched]:
        """Clear retired bits from at most `runs_max` runs; delete runs nothing needs any more. Returns the stretches
        with homes of which L2 copies went."""
        touched: list[Touched] = []
        if self._sweep is None:
            if not self.retired:
                return touched
            self._sweeping = self.retired
            self._sweep = self.visit()
        keep = ~self._sweeping
        for run in self._sweep.take(runs_max):
            if run.size and (run.l1 | run.l2) & self._sweeping:
                was_in_l2 = run.l2 & self._sweeping
                run.l1 &= keep
                run.l2 &= keep
                if was_in_l2 and run.homes is not None:
                    self._touch(run, 0, Tier.L2, touched)
                self.prune(run)
        if self._sweep.over:
            self._sweep.close()
            self._sweep = None
            self.retired &= keep
        return touched

    # ---------------------------------------------------------------------------------------------------------- copies

    def add_copies(self, bit: int, tier: Tier, ref: RunRef) -> Change:
        """A node holds the blocks of a checked run in a tier.

        Raises UnknownParent, and has added nothing; BrokenChain, and may have added blocks before the offending one.
        """
        names, skip = ref.names, ref.skip
        run = self._by_name.get(names[:NAME_BYTES])
        if run is not None and skip and run.start + run.size == ref.first_block + skip and run.children == 0:
            at = skip * NAME_BYTES
            if run.names.endswith(names[:at]):  # goes on where a leaf ends, as most that nodes tell
                rest = names[at:]
                self.grow(run, ref.first_block + skip, rest, *((bit, 0) if tier is Tier.L1 else (0, bit)))
                return Change(len(rest) // NAME_BYTES, NO_CHANGE.touched)
        above, depth = self._locate(ref)
        try:
            return self._add_below(above, depth, bit, tier, ref)
        except BrokenChain:
            self.prune(above)  # perhaps made only to hang these blocks below
            raise

    def _add_below(self, run: Run | None, depth: int, bit: int, tier: Tier, ref: RunRef) -> Change:
        """Add the blocks of `ref` that are meant below a position."""
        names, end = ref.names, len(ref.names)
        l1, l2 = (bit, 0) if tier is Tier.L1 else (0, bit)
        at = ref.skip * NAME_BYTES
        added = 0
        touched: list[Touched] = []
        while at < end:
            if run is None or depth == run.start + run.size:
                child = self._by_name.get(names[at : at + NAME_BYTES])
                if child is None:
                    rest = names[at:]
                    self.grow(run, depth, rest, l1, l2)
                    added += len(rest) // NAME_BYTES
                    break
                if child.parent is not run or child.start != depth:
                    raise BrokenChain(f"block {depth} is known under another parent")
                run = child
            same = common_blocks(run, depth, names, at)
            if same == 0:  # another continuation branches off inside this run
                run = self.split(run, depth - run.start)
                continue
            if (run.l1 & l1) | (run.l2 & l2) == 0:
                run = self._cut_out(run, depth, same)
                if run.homes is not None:
                    self._touch(run, bit, tier, touched)
                run.l1 |= l1
                run.l2 |= l2
                added += same
                self.merge(run)
            depth += same
            at += same * NAME_BYTES
        return Change(added, touched)

    def _locate(self, ref: RunRef) -> tuple[Run | None, int]:
        """The position of the first block meant. The blocks before it must be known; those of a run that starts a
        context are all named, so they are added as holes instead. Raises UnknownParent, BrokenChain."""
        if ref.first_block == 0:
            if ref.skip == 0:
                return None, 0
            before = ref.names[: ref.skip * NAME_BYTES]
            run, depth = self.walk(None, 0, before)
            if depth < ref.skip:
                run = self.extend(run, depth, before[depth * NAME_BYTES :])
            return run, ref.skip
        run = self._by_name.get(ref.names[:NAME_BYTES])
        if run is None:
            raise UnknownParent(f"block {ref.first_block} is not known")
        if not run.start <= ref.first_block < run.start + run.size:
            raise BrokenChain(f"block {ref.first_block} is known at another depth")
        if ref.skip == 0:
            return (run, ref.first_block) if run.start < ref.first_block else (run.parent, ref.first_block)
        found, depth = self.walk(run, ref.first_block, ref.names[: ref.skip * NAME_BYTES])
        if depth < ref.first_block + ref.skip:
            raise UnknownParent(f"block {depth} is not known")
        return found, depth

    def _cut_out(self, run: Run, depth: int, blocks: int) -> Run:
        """The blocks [depth, depth + blocks) of a run as a run of their own."""
        if depth > run.start:
            self.split(run, depth - run.start)
        if blocks < run.size:
            return self.split(run, blocks)
        return run

    def remove_copies(self, bit: int, tier: Tier, ref: RunRef) -> Change:
        """A node no longer holds the blocks of a checked run in a tier. Blocks not known here were not held."""
        try:
            pieces = self._held_pieces(bit, tier, ref)
        except BrokenChain:
            pieces = []
        removed = 0
        touched: list[Touched] = []
        for found, depth, blocks in pieces:  # parents first: a merge takes in earlier pieces, never later ones
            run = self._cut_out(found, depth, blocks)
            self._clear(run, bit, tier, touched)
            removed += blocks
        return Change(removed, touched)

    def _held_pieces(self, bit: int, tier: Tier, ref: RunRef) -> list[tuple[Run, int, int]]:
        """(run, depth, blocks) of the stretches of `ref` a node holds in a tier, in context order."""
        names, skip_to = ref.names, ref.first_block + ref.skip
        run = self._by_name.get(names[:NAME_BYTES])
        depth = ref.first_block
        pieces: list[tuple[Run, int, int]] = []
        at = 0
        while run is not None and run.start <= depth < run.start + run.size:
            same = common_blocks(run, depth, names, at)
            first = max(depth, skip_to)
            held = run.l1 if tier is Tier.L1 else run.l2
            if held & bit and first < depth + same:
                pieces.append((run, first, depth + same - first))
            depth += same
            at += same * NAME_BYTES
            if at >= len(names) or depth < run.start + run.size:
                break
            child = self._by_name.get(names[at : at + NAME_BYTES])
            run = child if child is not None and child.parent is run else None
        return pieces

    def _touch(self, run: Run, bit: int, tier: Tier, touched: list[Touched]) -> None:
        """A node has one copy more or less of a run, in a tier where the run shows none now."""
        gained_or_lost = not (run.l1 | run.l2) & bit
        if gained_or_lost or tier is Tier.L2:
            others = self.live & ~bit
            touched.append(Touched(run.names, run.homes or {}, gained_or_lost, run.l1 & others, run.l2 & others))
            self.mark_changed(run)

    def _clear(self, run: Run, bit: int, tier: Tier, touched: list[Touched]) -> None:
        """Take a node's bit from a whole run, then let the run go or merge."""
        if tier is Tier.L1:
            run.l1 &= ~bit
        else:
            run.l2 &= ~bit
        if run.homes is not None:
            self._touch(run, bit, tier, touched)
        self.prune(run)
        if run.size:
            self.merge(run)

    def clear(self, bit: int, tier: Tier, visit: Visit, runs_max: int) -> Change:
        """A tier of a node is being emptied: takes its bit from at most `runs_max` runs of a visit."""
        removed = 0
        touched: list[Touched] = []
        for run in visit.take(runs_max):
            if run.size and (run.l1 if tier is Tier.L1 else run.l2) & bit:
                removed += run.size
                self._clear(run, bit, tier, touched)
        return Change(removed, touched)

    def clear_tier(self, bit: int, tier: Tier) -> Change:
        """A tier of a node is empty. Walks all runs."""
        with self.visit() as visit:
            return self.clear(bit, tier, visit, len(self._by_name))

    # -------------------------------------------------------------------------------------------------------- matching

    def match(self, names: bytes) -> Match:
        """Where the leading blocks of a context are. Raises InvalidArgument, BrokenChain."""
        blocks = check_names(names)
        run, depth = self.deepest(None, 0, names)
        return self.score(self.stretches(run, depth), blocks)

    @staticmethod
    def path(run: Run | None) -> list[Run]:
        """The runs from the root to `run`."""
        path = []
        while run is not None:
            path.append(run)
            run = run.parent
        path.reverse()
        return path

    @staticmethod
    def stretches(run: Run | None, end: int) -> list[Stretch]:
        """Who holds the blocks up to depth `end`, which is in `run` or at its end; one more, from there on, is
        nobody's."""
        stretches = [(end, 0, 0)]
        while run is not None:
            stretches.append((run.start, run.l1, run.l2))
            run = run.parent
        stretches.reverse()
        return stretches

    def score(self, stretches: list[Stretch], blocks: int) -> Match:
        """Match a context of `blocks` blocks, the leading ones in `stretches`."""
        if len(stretches) == 1:
            return Match(blocks=blocks)
        left = iter(stretches)
        nodes, pool_blocks, any_blocks = self._depths(stretches[0], left)
        if any_blocks < 0:
            live = self.live
            for start, l1, l2 in left:
                if not l2 & live:
                    if pool_blocks < 0:
                        pool_blocks = start
                    if not l1 & live:
                        any_blocks = start
                        break
        return Match(blocks, pool_blocks, any_blocks, nodes, stretches, self._slots_seen)

    def _depths(self, first: Stretch, left: Iterator[Stretch]) -> tuple[dict[str, NodeDepth], int, int]:
        """How deep the copies of each node reach that holds the first stretch; takes stretches up to the first that
        none of them holds. Returns also the depths where the pool ends and where copies do, if they were met (else
        -1)."""
        live, nodes_of = self.live, self.nodes_of
        l1, l2 = first[1] & live, first[2] & live  # nodes that hold everything so far
        either = l1 | l2
        l1_ends: dict[str, int] = {}
        l2_ends: dict[str, int] = {}
        nodes: dict[str, NodeDepth] = {}
        pool_blocks = -1
        alike = bool(l2)  # whether nothing can end in a stretch that all of l1 and l2 hold
        for start, run_l1, run_l2 in left:
            if alike and run_l2 & l2 == l2 and (not l1 or run_l1 & l1 == l1):
                continue
            if pool_blocks < 0 and not run_l2 & live:
                pool_blocks = start
            if lost := l1 & ~run_l1:
                for node in nodes_of[lost]:
                    l1_ends[node] = start
                l1 ^= lost
            if lost := l2 & ~run_l2:
                for node in nodes_of[lost]:
                    l2_ends[node] = start
                l2 ^= lost
            if lost := either & ~(run_l1 | run_l2):
                for node in nodes_of[lost]:
                    depths = (l1_ends.get(node, 0), l2_ends.get(node, 0), start)
                    nodes[node] = tuple.__new__(NodeDepth, depths)  # as NodeDepth(*depths), in half the time
                either ^= lost
            if not either:
                return nodes, pool_blocks, -1 if (run_l1 | run_l2) & live else start
            alike = either == l1 | l2 and bool(l2 or pool_blocks >= 0)
        raise AssertionError("the last stretch is nobody's")
