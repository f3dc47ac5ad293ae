"""The directory sets aside what survived a long garbage collection, and only then."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from directory_harness import directory
from etcd_process import Etcd

from evolving.runtime.clock import ManualClock
from evolving_directory.collector import ShortCollections, begin


@pytest.fixture(autouse=True)
def _unfrozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def collect(duration_s: float, generation: int) -> int:
    """One collection that took so long; how many objects are set aside after it."""
    clock = ManualClock()
    watch = ShortCollections(clock)
    watch("start", {"generation": generation})
    clock.jump(duration_s)
    watch("stop", {"generation": generation})
    return gc.get_freeze_count()


def test_a_long_full_collection_sets_aside_what_survived_it() -> None:
    assert collect(0.05, 2) > 0


def test_short_and_partial_collections_set_nothing_aside() -> None:
    assert collect(0.001, 2) == 0
    assert collect(0.05, 1) == 0


def test_its_end_leaves_the_collector_as_it_was() -> None:
    before = list(gc.callbacks)
    watch = begin(ManualClock())
    assert gc.get_freeze_count() > 0
    assert gc.callbacks == [*before, watch]
    watch.end()
    assert (gc.get_freeze_count(), gc.callbacks) == (0, before)


async def test_a_directory_that_was_served_leaves_the_collector_as_it_was(etcd: Etcd) -> None:
    before = list(gc.callbacks)
    async with directory(etcd):
        assert gc.get_freeze_count() > 0
    assert (gc.get_freeze_count(), gc.callbacks) == (0, before)
