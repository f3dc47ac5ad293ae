"""What an office may write, and what becomes of fits when another leader wrote too, or nobody could."""

from __future__ import annotations

import asyncio

import pytest
from planner_harness import KEYS
from planner_in_time import cluster, lose_office, to_shape
from waiting import eventually

from evolving.core.iterations import IterationSums, IterationWindow
from evolving.core.planner import SplitShape, release
from evolving.core.timemodel import PrefillSums
from evolving.runtime.errors import StoreUnavailable
from evolving.runtime.store import Fenced
from evolving_planner.models import EndedWindow, ModelBook
from evolving_planner.view import LEADER_ROLE


async def test_a_former_leader_writes_nothing() -> None:
    async with cluster() as planned:
        key = KEYS.leader(LEADER_ROLE)
        await planned.store.delete(key)
        await planned.store.put(key, b"another")
        with pytest.raises(Fenced):
            await planned.office.store_model(lambda: b"[]")
        with pytest.raises(Fenced):
            await planned.office.decide(to_shape(SplitShape(1, 3)))
        with pytest.raises(Fenced):
            await planned.office.decide(
                lambda now: release(now.split, reason="", author="x", prefill_share=0.5, now_s=0.0)
            )
        assert await planned.store.get(KEYS.model) is None
        assert len((await planned.store.list(KEYS.decisions)).items) == 1
        assert planned.view.split.epoch == 1


def windows(count: int, c1_s: float) -> list[EndedWindow]:
    """Of a node that needs 0.02 s an iteration and `c1_s` a token more."""
    found = []
    for number in range(count):
        tokens = 100.0 + 37 * number % 400
        prefill = PrefillSums(tokens, tokens * (10 + number % 7))
        found.append(EndedWindow(float(number), IterationWindow(IterationSums(2, 0.04 + c1_s * tokens, prefill))))
    return found


async def test_fits_are_stored_once_and_what_somebody_else_stores_is_taken() -> None:
    async with cluster() as planned:
        learning, nodes = planned.learning, planned.view.nodes
        learning.models.take("a", windows(40, c1_s=0.002))
        await learning.refit()
        stored = await planned.store.get(KEYS.model)
        assert stored is not None
        assert stored.value == learning.models.encode()
        await learning.refit()
        assert await planned.store.get(KEYS.model) == stored, "nothing changed"

        other = ModelBook()
        other.take("a", windows(40, c1_s=0.005))
        assert other.refit(nodes, now_s=1.0)
        theirs = await planned.store.put(KEYS.model, other.encode())
        await eventually(lambda: planned.view.model_revision == theirs.mod_revision)
        await learning.refit()
        assert learning.models.encode() == other.encode()

        spoiled = await planned.store.put(KEYS.model, b"{")
        await eventually(lambda: planned.view.model_revision == spoiled.mod_revision)
        await learning.refit({"a"})
        mended = await planned.store.get(KEYS.model)
        assert mended is not None
        assert mended.value == learning.models.encode()


async def test_fits_that_could_not_be_stored_are_stored_later() -> None:
    async with cluster() as planned:
        planned.learning.models.take("a", windows(40, c1_s=0.002))
        planned.store.set_available(False)
        with pytest.raises(StoreUnavailable):
            await planned.learning.refit()
        planned.store.set_available(True)
        await planned.learning.refit()
        stored = await planned.store.get(KEYS.model)
        assert stored is not None
        assert stored.value == planned.learning.models.encode() != ModelBook().encode()


async def test_fits_that_another_leader_stored_meanwhile_are_not_written_over() -> None:
    """What is fitted when a term begins waits until it has begun, and is of that term then."""
    async with cluster() as planned:
        learning, store = planned.learning, planned.store
        await lose_office(planned)
        store.lists, store.may_list = 0, asyncio.Event()

        async def begins() -> bool:
            await planned.clock.advance(0.25)
            return store.lists > 0

        await eventually(begins)
        learning.models.take("a", windows(40, c1_s=0.002))
        storing = asyncio.create_task(learning.refit())
        await eventually(lambda: bool(learning.models.outcomes))
        other = ModelBook()
        other.take("a", windows(40, c1_s=0.005))
        other.refit(planned.view.nodes, now_s=1.0)
        await store.put(KEYS.model, other.encode())
        store.may_list.set()
        await storing
        stored = await store.get(KEYS.model)
        assert stored is not None
        assert stored.value == other.encode() == learning.models.encode()


async def test_a_fit_whose_caller_went_away_is_stored_with_the_next() -> None:
    async with cluster() as planned:
        learning = planned.learning
        learning.models.take("a", windows(40, c1_s=0.002))
        asked = asyncio.create_task(learning.refit({"a"}))
        await asyncio.sleep(0)  # it is under way
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert learning.models.outcomes
        assert await planned.store.get(KEYS.model) is None
        await learning.refit()
        stored = await planned.store.get(KEYS.model)
        assert stored is not None
        assert stored.value == learning.models.encode() != ModelBook().encode()
