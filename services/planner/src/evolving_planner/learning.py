"""Keeps the fitted time models: fitted by the leader from what nodes report, stored in etcd, read from there by all."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from evolving.runtime.clock import Clock
from evolving.runtime.errors import NotLeader, StoreUnavailable
from evolving.runtime.keys import BadRecord
from evolving.runtime.log import get_logger
from evolving.runtime.store import Conflict, Fenced
from evolving.runtime.tasks import in_thread
from evolving_planner.metrics import PlannerMetrics
from evolving_planner.models import ModelBook
from evolving_planner.office import Office
from evolving_planner.view import View

_PERIOD_S = 3.0
_LARGEST_BYTES = 1_000_000  # etcd refuses requests beyond 1.5 MiB

_log = get_logger(__name__)


class Learning:
    """Present in every planner; fits and writes only in a term of office."""

    def __init__(self, view: View, office: Office, models: ModelBook, clock: Clock, metrics: PlannerMetrics) -> None:
        self.models = models
        self._view = view
        self._office = office
        self._clock = clock
        self._metrics = metrics
        self._lock = asyncio.Lock()  # one fit at a time
        self._revision = 0  # of the record in etcd that `models` knows
        self._unsaved = False
        office.on_term(self.follow)

    async def run(self) -> None:
        """Fit what is due every few seconds, for ever."""
        while True:
            await self._clock.sleep(_PERIOD_S)
            try:
                if self._office.term is None:
                    self.follow()
                else:
                    await self.refit()
            except (NotLeader, Fenced) as error:
                _log.info("office_lost", error=str(error))
            except (Conflict, StoreUnavailable) as error:
                _log.warning("models_not_stored", error=str(error))

    async def refit(self, wanted: Collection[str] = ()) -> None:
        """Fit what is due, and `wanted` nodes in any case; store what changed.

        Raises NotLeader, Fenced, Conflict, StoreUnavailable: what was fitted is then stored with a later call.
        """
        async with self._lock:
            self.follow()
            nodes, now_s = dict(self._view.nodes), self._clock.wall_s()

            def fit() -> None:  # what it changes is to be stored though the caller be gone when it ends
                if self.models.refit(nodes, now_s, wanted):
                    self._unsaved = True
                    self._metrics.refitted(self.models.outcomes)

            # Least squares of many nodes take a while; proposals and reports are served meanwhile.
            await in_thread(fit)
            self._metrics.knows(self.models.views(self._view.nodes))
            if self._unsaved:
                await self._store()

    async def _store(self) -> None:
        size_bytes = len(self.models.encode())
        if size_bytes > _LARGEST_BYTES:
            _log.error("models_too_large", size_bytes=size_bytes)  # thousands of nodes; this leader goes on with them
        else:
            self._revision = await self._office.store_model(self.models.encode)
        self._unsaved = False

    def follow(self) -> None:
        """Take what somebody else wrote."""
        if self._view.model_revision in (0, self._revision):
            return  # none, or the own one; a record that was deleted is written anew with the next fit
        self._revision = self._view.model_revision
        try:
            self.models.adopt(self._view.model)
        except BadRecord as error:
            _log.error("bad_record_ignored", key="model", error=str(error))
