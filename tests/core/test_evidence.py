"""What is kept of earlier windows, beside a naive model that keeps every window it was ever given."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.planning import a_slice
from hypothesis import given
from hypothesis import strategies as st

from evolving.core.config import PlannerConfig
from evolving.core.evidence import Evidence
from evolving.core.slices import Slice

SLICE_S, SLICES = 60.0, 4


def window(end_s: float) -> tuple[Slice, ...]:
    """Of slices that bear their start as their open requests."""
    starts_s = [end_s - SLICE_S * back for back in range(SLICES, 0, -1)]
    return tuple(a_slice(None, open_requests=start_s, started_s=start_s) for start_s in starts_s)


@dataclass
class Naive:
    windows_most: int
    given: list[tuple[Slice, ...]] = field(default_factory=list)

    def before(self, begins_s: float, since_s: float) -> list[Slice]:
        """From the newest window back, what nothing newer overlaps, of the present split's time."""
        found: list[Slice] = []
        for slices in reversed(self.given):
            begin_s = min([begins_s, *(kept.started_s for kept in found)])
            found = [each for each in slices if each.ended_s <= begin_s and each.started_s >= since_s] + found
        most = (self.windows_most - 1) * SLICES
        return found[-most:] if most else []


@given(
    steps=st.lists(st.tuples(st.integers(1, 6), st.none() | st.integers(0, 30)), max_size=12),
    windows_most=st.integers(1, 4),
    waited=st.integers(0, 12),
)
def test_slices_since_the_split_was_written_are_kept_once_and_no_more_than_allowed(
    steps: list[tuple[int, int | None]], windows_most: int, waited: int
) -> None:
    """Windows follow each other by any number of slices: some overlap, some leave a gap. Splits are written at any
    time, in the middle of a window and of a slice."""
    config = PlannerConfig(SLICE_S * SLICES, SLICES, slices_valid_least=2, evidence_windows=windows_most)
    real, naive = Evidence(config), Naive(windows_most)
    end_s, since_s = 1000.0, -1e9
    for later, changed in steps:
        end_s += later * SLICE_S
        if changed is not None:
            since_s = max(since_s, end_s - changed * SLICE_S / 3)
        expected = naive.before(end_s - SLICE_S * SLICES, since_s)
        assert list(real.before(window(end_s), since_s)) == expected
        assert list(real.add(window(end_s), since_s)) == expected
        naive.given.append(window(end_s))
    end_s += waited * SLICE_S
    assert list(real.before(window(end_s), since_s)) == naive.before(end_s - SLICE_S * SLICES, since_s)
    assert real.before(window(end_s), end_s) == ()


def test_windows_whose_ends_are_rounded_lose_no_slice() -> None:
    config = PlannerConfig(window_s=0.3, slices=3, slices_valid_least=2)
    evidence, end_s = Evidence(config), 1.1
    for count in range(5):
        slices = tuple(Slice(end_s - 0.1 * back, end_s - 0.1 * (back - 1), 0, 0, 0.0, None) for back in (3, 2, 1))
        assert len(evidence.add(slices, 0.0)) == 3 * count
        end_s += 0.3
