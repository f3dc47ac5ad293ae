"""One engine's life: started, watched, started again after a crash, stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable

from evolving.runtime.clock import Clock
from evolving.runtime.log import get_logger
from evolving_node_agent.engines.port import Engine, EngineError, EngineInfo
from evolving_node_agent.restart import RestartPolicy

_log = get_logger(__name__)


class EngineGivenUp(Exception):
    """The engine keeps failing; the agent ends, and whoever supervises it decides."""


class Supervisor:
    """Runs an engine. `on_up(info)` and `on_down()` frame each life; the engine serves between them."""

    def __init__(
        self,
        engine: Engine,
        policy: RestartPolicy,
        clock: Clock,
        on_up: Callable[[EngineInfo], Awaitable[None]],
        on_down: Callable[[], Awaitable[None]],
    ) -> None:
        self._engine = engine
        self._policy = policy
        self._clock = clock
        self._on_up = on_up
        self._on_down = on_down
        self.info: EngineInfo | None = None  # of the running life
        self.starts = 0  # the first included

    async def run(self) -> None:
        """Keep the engine alive until cancelled. Raises EngineGivenUp."""
        while True:
            why = await self._live()
            wait_s = self._policy.failed(self._clock.now_s())
            if wait_s is None:
                raise EngineGivenUp(f"the engine failed too often: {why}")
            _log.warning("engine_restarts", why=why, wait_s=wait_s, starts=self.starts)
            await self._clock.sleep(wait_s)

    async def _live(self) -> str:
        """One life; why it ended."""
        self.starts += 1
        started_s = self._clock.now_s()
        try:
            info = await self._engine.start()
        except EngineError as error:
            return str(error)
        self.info = info
        _log.info(
            "engine_up", incarnation=info.incarnation, pid=info.pid, took_s=round(self._clock.now_s() - started_s, 3)
        )
        try:
            await self._on_up(info)
            status = await self._engine.exited()
        except EngineError as error:
            return str(error)
        finally:
            self.info = None
            await self._on_down()
        return f"exit status {status}"

    async def stop(self, grace_s: float) -> None:
        """Stop the engine. `run` must have been cancelled."""
        await self._engine.stop(grace_s)

    def kill(self) -> None:
        """End the engine's process group this instant, where it has one of its own."""
        if self.info is None or self.info.pid == os.getpid():
            return
        try:
            group = os.getpgid(self.info.pid)
            if group != os.getpgrp():
                os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            return  # it is gone, as it should be
