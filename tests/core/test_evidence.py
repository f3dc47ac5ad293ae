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
    given: list[tuple[int, tuple[Slice, ...]]] = field(default_factory=list)

    def before(self, begins_s: float, epoch: int) -> list[Slice]:
        """From the newest window back, as long as the split stays, what nothing newer overlaps."""
        found: list[Slice] = []
        for of_epoch, slices in reversed(self.given):
            if of_epoch != epoch:
                break
            begin_s = min([begins_s, *(kept.started_s for kept in found)])
            found = [each for each in slices if each.ended_s <= begin_s] + found
        most = (self.windows_most - 1) * SLICES
        return found[-most:] if most else []


@given(
    steps=st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=12),
    windows_most=st.integers(1, 4),
    waited=st.integers(0, 12),
)
def test_slices_under_the_present_split_are_kept_once_and_no_more_than_allowed(
    steps: list[tuple[int, bool]], windows_most: int, waited: int
) -> None:
    """Windows follow each other by any number of slices: some overlap, some leave a gap."""
    config = PlannerConfig(SLICE_S * SLICES, SLICES, slices_valid_least=2, evidence_windows=windows_most)
    real, naive = Evidence(config), Naive(windows_most)
    end_s, epoch = 1000.0, 1
    for later, changed in steps:
        end_s += later * SLICE_S
        epoch += changed
        assert list(real.before(window(end_s), epoch)) == naive.before(end_s - SLICE_S * SLICES, epoch)
        real.keep(window(end_s), epoch)
        naive.given.append((epoch, window(end_s)))
    end_s += waited * SLICE_S
    before = real.before(window(end_s), epoch)
    assert list(before) == naive.before(end_s - SLICE_S * SLICES, epoch)
    assert real.before(window(end_s), epoch) == before
    assert real.before(window(end_s), epoch + 1) == ()


def test_windows_whose_ends_are_rounded_lose_no_slice() -> None:
    config = PlannerConfig(window_s=0.3, slices=3, slices_valid_least=2)
    evidence, end_s = Evidence(config), 1.1
    for count in range(5):
        slices = tuple(Slice(end_s - 0.1 * back, end_s - 0.1 * (back - 1), 0, 0, 0.0, None) for back in (3, 2, 1))
        assert len(evidence.before(slices, 1)) == 3 * count
        evidence.keep(slices, 1)
        end_s += 0.3
