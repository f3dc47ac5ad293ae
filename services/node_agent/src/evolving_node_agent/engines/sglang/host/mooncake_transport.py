"""One-sided reads of peers' memory by Mooncake.

What its documentation does not say and runs showed: a batch's status is that of its first task, so batches have one
task; an id polled after its end crashes the process; first contact with a stopped peer blocks the submitting thread for
a minute, so each peer has a thread; an abandoned read still writes, so a read is over only when every id has ended.
Its ports know no authentication.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .pages import Range

_IN_FLIGHT_MAX = 512
_POLL_S = 0.0003
_ENVIRONMENT = {
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_SLICE_SIZE": str(16 << 20),
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",
    "MC_DISABLE_METACACHE": "1",  # a peer restarted on its old port is a new peer
    "MC_LOG_LEVEL": "ERROR",
}


@dataclass(slots=True)
class _Job:
    ranges: Sequence[Range]
    over: Callable[[bool], None]


class MooncakeTransport:
    """`Transport` over Mooncake's transfer engine."""

    def __init__(self, host: str, protocol: str, device: str) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from mooncake.engine import TransferEngine

        self._engine: Any = TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, device):
            raise RuntimeError("the Mooncake transfer engine did not initialize")
        self.session = f"{host}:{self._engine.get_rpc_port()}"
        self._peers: dict[str, queue.SimpleQueue[_Job]] = {}

    def register(self, address: int, size: int) -> None:
        """As the port says. Raises RuntimeError."""
        if self._engine.register_memory(address, size):
            raise RuntimeError(f"Mooncake refused {size} bytes of memory")

    def read(self, session: str, ranges: Sequence[Range], over: Callable[[bool], None]) -> None:
        """As the port says. From one thread."""
        if session not in self._peers:
            self._peers[session] = queue.SimpleQueue()
            arguments = (session, self._peers[session])
            threading.Thread(target=self._work, args=arguments, name=f"read {session}", daemon=True).start()
        self._peers[session].put(_Job(ranges, over))

    def _work(self, session: str, jobs: queue.SimpleQueue[_Job]) -> None:
        while True:
            job = jobs.get()
            job.over(self._read_all(session, job.ranges))

    def _read_all(self, session: str, ranges: Sequence[Range]) -> bool:
        waiting = list(reversed(ranges))
        flying: list[int] = []
        ok = True
        while flying or (waiting and ok):
            while waiting and ok and len(flying) < _IN_FLIGHT_MAX:
                own, peer, size = waiting.pop()
                batch = self._engine.batch_transfer_async_read(session, [own], [peer], [size])
                if batch in (0, -1):
                    ok = False
                else:
                    flying.append(batch)
            states = [(batch, self._engine.transfer_check_status(batch)) for batch in flying]
            ok = ok and all(state >= 0 for _, state in states)
            flying = [batch for batch, state in states if state == 0]
            if flying:
                time.sleep(_POLL_S)
        return ok
