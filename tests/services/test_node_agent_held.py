"""What a node says of its copies, read back by the directory itself: it always knows what is held."""

from __future__ import annotations

import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st

from evolving.core import directory_types as core
from evolving.core.directory import Directory
from evolving.core.terms import NAME_BYTES
from evolving_node_agent.engines.port import Cleared, KvEvent, Removed, Stored, Tier
from evolving_node_agent.held import RUN_BLOCKS_MAX, Change, HeldTable


def name(*path: int) -> bytes:
    """The name of the block at the end of a path."""
    return hashlib.sha256(repr(path).encode()).digest()[:NAME_BYTES]


def core_events(changes: list[Change]) -> list[core.NodeEvent]:
    """Changes as the directory takes them."""
    events: list[core.NodeEvent] = []
    for change in changes:
        if change.run is None:
            events.append(core.Cleared(change.tier))
            continue
        ref = core.RunRef(change.run.first_block, b"".join(change.run.names), change.run.skip)
        events.append(core.Stored(change.tier, ref) if change.stored else core.Removed(change.tier, ref))
    return events


class Pair:
    """A table and a directory that hears of nothing but the table's changes."""

    def __init__(self) -> None:
        self.table = HeldTable()
        self.directory = Directory()
        self.directory.node_up(0.0, "n", "i", 1)
        self.sequence = 0
        self.held: set[tuple[bytes, Tier]] = set()
        self.names: set[bytes] = set()

    def apply(self, *events: KvEvent) -> None:
        """Both sides take the engine's events."""
        changes = self.table.apply(events)
        self.table.check_invariants()
        self.sequence += 1
        effects = self.directory.node_events(0.0, "n", "i", self.sequence, core_events(changes))
        assert not any(isinstance(effect, core.NeedResync) for effect in effects), effects
        for event in events:
            if isinstance(event, Stored):
                self.held.update((each, event.tier) for each in event.names)
                self.names.update(event.names)
            elif isinstance(event, Removed):
                self.held.difference_update((each, event.tier) for each in event.names)
            else:
                self.held = {each for each in self.held if each[1] is not event.tier}
        self.check(self.directory)

    def check(self, directory: Directory) -> None:
        """The directory's copies are those held."""
        directory.check_invariants()
        for each in self.names:
            view = directory.block(each)
            copies = view.copies if view is not None else ()
            seen = {tier for copy in copies for tier in Tier if (copy.in_l1 if tier is Tier.L1 else copy.in_l2)}
            assert seen == {tier for tier in Tier if (each, tier) in self.held} == self.table.tiers(each)

    def check_snapshot(self) -> None:
        """A directory that knows nothing learns all from a snapshot."""
        fresh = Directory()
        fresh.node_up(0.0, "n", "i", 99)
        fresh.resync_begin(0.0, "n", "i")
        fresh.resync_events(0.0, "n", "i", core_events(list(self.table.snapshot())))
        fresh.resync_end(0.0, "n", "i", 99)
        self.check(fresh)


def line(start: int, end: int, *prefix: int) -> tuple[bytes, ...]:
    """Names of blocks [start, end) of one context; equal prefixes are one context."""
    return tuple(name(*prefix, depth) for depth in range(start, end))


def test_a_long_context_grows_and_shrinks() -> None:
    pair = Pair()
    names = line(0, 40)
    pair.apply(Stored(Tier.L1, None, names[:10]))
    pair.apply(Stored(Tier.L1, names[9], names[10:40]), Stored(Tier.L2, None, names[:40]))
    pair.check_snapshot()
    pair.apply(Removed(Tier.L1, (names[39], names[17], names[16], names[38])))
    pair.check_snapshot()
    pair.apply(Cleared(Tier.L2))
    pair.check_snapshot()
    pair.apply(Stored(Tier.L2, names[15], names[16:20]))
    pair.check_snapshot()


def test_holes_are_named_in_a_snapshot() -> None:
    """Ancestors held nowhere still say where a block is."""
    pair = Pair()
    names = line(0, 60)
    pair.apply(Stored(Tier.L2, None, names))
    pair.apply(Removed(Tier.L2, names[:50]))
    assert len(pair.table) == 60, "ancestors stay while a descendant is held"
    pair.check_snapshot()
    pair.apply(Removed(Tier.L2, names[50:]))
    assert len(pair.table) == 0


def test_runs_are_cut() -> None:
    table = HeldTable()
    names = line(0, 2 * RUN_BLOCKS_MAX + 5)
    (first, *rest) = table.apply([Stored(Tier.L1, None, names)])
    assert first.run is not None
    assert len(first.run.names) == RUN_BLOCKS_MAX
    assert len(rest) == 2
    assert sum(len(change.run.names) - change.run.skip for change in table.snapshot() if change.run) == len(names)


def test_events_without_a_place_are_counted_and_skipped() -> None:
    table = HeldTable()
    assert table.apply([Stored(Tier.L1, name(7), (name(8),)), Removed(Tier.L1, (name(9),))]) == []
    assert (table.unknown_parents, table.unknown_removals) == (1, 1)


_steps = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "remove", "clear"]),
        st.sampled_from(list(Tier)),
        st.integers(0, 3),  # which context
        st.integers(0, 40),
        st.integers(1, 24),
    ),
    max_size=25,
)


@given(_steps)
@settings(max_examples=150)
def test_the_directory_always_knows_what_is_held(steps: list[tuple[str, Tier, int, int, int]]) -> None:
    # Four contexts: 1 and 2 leave context 0 at blocks 5 and 20, 3 stands alone.
    trunk = line(0, 64)
    contexts = [trunk, trunk[:5] + line(5, 64, 1), trunk[:20] + line(20, 64, 2), line(0, 64, 3)]
    pair = Pair()
    for kind, tier, which, start, length in steps:
        names = contexts[which]
        if kind == "clear":
            pair.apply(Cleared(tier))
        elif kind == "remove":
            held = [each for each in names[start : start + length] if (each, tier) in pair.held]
            pair.apply(Removed(tier, tuple(held)))
        else:
            # An engine stores below what it holds: go on from the deepest held ancestor.
            first = max((at + 1 for at in range(start) if pair.table.tiers(names[at])), default=0)
            parent = names[first - 1] if first else None
            pair.apply(Stored(tier, parent, names[first : start + length]))
    pair.check_snapshot()
