"""Names that are no digests, numbers out of range, events out of place: refused with a type, and nothing breaks.

Chained digests never name a block under two parents. Whoever computes them wrongly must not be able to leave the
directory in a state it could not have come to rightly.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from core.pair import chain, run_ref
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evolving.core.config import DirectoryConfig
from evolving.core.directory import Directory
from evolving.core.directory_types import (
    AuditReport,
    Begin,
    BranchView,
    Cleared,
    CountUpdate,
    Effect,
    Landed,
    NeedResync,
    Output,
    Removed,
    RunRef,
    Stats,
    Stored,
)
from evolving.core.errors import BrokenChain, CoreError, InvalidArgument
from evolving.core.terms import Phase, Role, Tier

NODES = ("n0", "n1")
forged_names = st.lists(st.integers(0, 19), min_size=0, max_size=24).map(
    lambda numbers: b"".join(number.to_bytes(16, "little") for number in numbers)
)
small = st.integers(0, 20)
branch_ids = st.sampled_from("abc")
node_ids = st.sampled_from(NODES)
request_ids = st.integers(0, 3).map("r{}".format)
begins = st.builds(
    Begin,
    st.just("t"),
    branch_ids,
    request_ids,
    version=st.integers(0, 2),
    base_blocks=st.sampled_from([0, 0, 0, 1, 3, 16]),
    base_name=st.integers(0, 19).map(lambda number: number.to_bytes(16, "little")),
    new_names=forged_names,
).map(lambda begin: begin if begin.base_blocks else Begin(*_fields(begin)))
landings = st.builds(
    Landed,
    st.just("t"),
    branch_ids,
    small.map("r{}".format),
    st.integers(1, 2),
    st.sampled_from(Phase),
    node_ids,
    small,
)
outputs = st.builds(
    Output, st.just("t"), branch_ids, small.map("r{}".format), st.integers(1, 2), node_ids, small, forged_names
)
runs = st.builds(RunRef, st.sampled_from([0, 0, 16]), forged_names, st.sampled_from([0, 0, 1, 5]))
changes = st.one_of(
    st.builds(Stored, st.sampled_from(Tier), runs),
    st.builds(Removed, st.sampled_from(Tier), runs),
    st.builds(Cleared, st.sampled_from(Tier)),
)
batches = st.tuples(node_ids, st.lists(changes, min_size=1, max_size=3))
ends = st.tuples(st.just("end"), branch_ids)
switches = st.tuples(st.just("switch"), node_ids)
Step = Begin | Landed | Output | tuple[str, str | list[Stored | Removed | Cleared]]


def _fields(begin: Begin) -> tuple[str, str, str, int, str, int, bytes, bytes]:
    return (begin.tenant, begin.branch_id, begin.request_id, begin.version, "", 0, b"", begin.new_names)


class Besieged:
    """A directory, its nodes, and the counts they were pushed."""

    def __init__(self) -> None:
        self.directory = Directory(DirectoryConfig(run_blocks_max=4))
        self.sequence = dict.fromkeys(NODES, 0)
        self.pushed: dict[str, dict[bytes, int]] = {node_id: {} for node_id in NODES}
        for node_id in NODES:
            self.directory.node_up(0.0, node_id, "life")

    def seen(self) -> tuple[Stats, list[BranchView], AuditReport]:
        """What a failure must leave as it was, but for blocks without copy or count."""
        stats = self.directory.stats()
        return stats, self.directory.branches(0.0), self.directory.audit()

    def take(self, step: Step) -> None:
        """One step; expected failures are raised."""
        directory = self.directory
        if isinstance(step, Begin):
            self._hear(directory.begin(0.0, step)[1])
        elif isinstance(step, Landed):
            self._hear(directory.landed(0.0, step))
        elif isinstance(step, Output):
            self._hear(directory.output(0.0, step))
        elif step[0] == "end":
            self._hear(directory.end(0.0, "t", [str(step[1])]))
        elif step[0] == "switch":
            self._hear(directory.role_switch(0.0, str(step[1]), Role.DECODE, Role.PREFILL))
        else:
            node_id, events = step
            assert isinstance(events, list)
            self._hear(directory.node_events(0.0, node_id, "life", self.sequence[node_id] + 1, events))
            self.sequence[node_id] += 1

    def _hear(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, CountUpdate):
                names = [effect.names[at : at + 16] for at in range(0, len(effect.names), 16)]
                self.pushed[effect.node_id].update(dict.fromkeys(names, effect.count))
            elif isinstance(effect, NeedResync):  # it comes back empty
                self.directory.resync_begin(0.0, effect.node_id, "life")
                self.directory.resync_end(0.0, effect.node_id, "life", self.sequence[effect.node_id] + 1)


@settings(max_examples=400, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
@given(st.lists(st.one_of(begins, begins, landings, outputs, batches, batches, ends, switches), max_size=25))
def test_forged_names_break_nothing(steps: list[Step]) -> None:
    besieged = Besieged()
    for step in steps:
        before = besieged.seen()
        try:
            besieged.take(step)
        except CoreError:
            assert besieged.seen() == before, step
        besieged.directory.check_invariants()
        assert besieged.directory.audit().mismatch_count == 0
    for branch_id in "abc":
        besieged.directory.end(0.0, "t", [branch_id])
    besieged.directory.check_invariants()
    assert not any(besieged.directory.node_counts(node_id) for node_id in NODES)


@pytest.mark.parametrize(
    "call",
    [
        lambda d: d.begin(0.0, Begin("t", "", "r")),
        lambda d: d.begin(0.0, Begin("t", "b", "")),
        lambda d: d.begin(0.0, Begin("t", "b", "r", version=-1)),
        lambda d: d.begin(0.0, Begin("t", "b", "r", new_names=b"short")),
        lambda d: d.begin(0.0, Begin("t", "b", "r", base_blocks=1)),
        lambda d: d.begin(0.0, Begin("t", "b", "r", base_name=bytes(16))),
        lambda d: d.begin(0.0, Begin("t", "b", "r", base_blocks=-1, base_name=bytes(16))),
        lambda d: d.match(0.0, b"short"),
        lambda d: d.landed(0.0, Landed("t", "b", "r", 1, Phase.DECODE, "n0", -1)),
        lambda d: d.landed(0.0, Landed("t", "b", "r", 1, Phase.DECODE, "n0", 1, -1)),
        lambda d: d.output(0.0, Output("t", "b", "r", 1, "n0", 0, b"short")),
        lambda d: d.output(0.0, Output("t", "b", "r", 1, "n0", 0, b"")),
        lambda d: d.output(0.0, Output("t", "b", "r", 1, "n0", -1, bytes(16))),
        lambda d: d.node_up(0.0, "", "life"),
        lambda d: d.node_up(0.0, "n9", ""),
        lambda d: d.node_events(0.0, "n0", "life", 1, [Stored(Tier.L1, RunRef(0, b"short"))]),
        lambda d: d.node_events(0.0, "n0", "life", 1, [Stored(Tier.L1, RunRef(0, b""))]),
        lambda d: d.node_events(0.0, "n0", "life", 1, [Stored(Tier.L1, RunRef(8, bytes(16)))]),
        lambda d: d.node_events(0.0, "n0", "life", 1, [Removed(Tier.L1, RunRef(-16, bytes(16)))]),
        lambda d: d.node_events(0.0, "n0", "life", 1, [Removed(Tier.L1, RunRef(0, bytes(16), skip=1))]),
        lambda d: d.node_events(0.0, "n0", "life", 1, [Removed(Tier.L1, RunRef(0, bytes(16), skip=-1))]),
        lambda d: d.block(b"short"),
    ],
)
def test_what_cannot_be_is_an_invalid_argument(call: Callable[[Directory], object]) -> None:
    besieged = Besieged()
    before = besieged.seen()
    with pytest.raises(InvalidArgument):
        call(besieged.directory)
    assert besieged.seen() == before
    besieged.directory.check_invariants()


def test_a_name_at_another_depth_is_refused() -> None:
    besieged = Besieged()
    names = b"".join(chain([], "a" * 40))
    besieged.directory.begin(0.0, Begin("t", "b", "r", new_names=names))
    moved = b"".join(chain([], "b" * 16)) + names
    before = besieged.seen()
    with pytest.raises(BrokenChain):
        besieged.directory.begin(0.0, Begin("t", "c", "r", new_names=moved))
    assert besieged.seen() == before
    besieged.directory.check_invariants()


def test_a_snapshot_with_an_unknown_parent_is_refused() -> None:
    besieged = Besieged()
    path = chain([], "a" * 40)
    besieged.directory.resync_begin(0.0, "n0", "life")
    with pytest.raises(InvalidArgument):
        besieged.directory.resync_events(0.0, "n0", "life", [Stored(Tier.L2, run_ref(path, 30, 40))])
    besieged.directory.check_invariants()
    with suppress(CoreError):
        besieged.directory.resync_end(0.0, "n0", "life", 1)
    besieged.directory.check_invariants()
