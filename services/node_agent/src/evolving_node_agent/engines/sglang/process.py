"""The engine's operating-system process: its own process group, gone when its parent is gone."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LOG_TAIL_BYTES = 6000
_GROUP_POLL_S = 0.02
_SWEEPS_MAX = 250


@dataclass(slots=True)
class EngineProcess:
    """A started engine process and our end of its socket."""

    process: asyncio.subprocess.Process
    channel: socket.socket
    log_path: Path

    @property
    def pid(self) -> int:
        """Process id, and id of the process group."""
        return self.process.pid

    def log_tail(self) -> str:
        """The end of what the process wrote."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - _LOG_TAIL_BYTES))
            return log.read().decode(errors="replace")

    def signal_group(self, number: signal.Signals) -> None:
        """Signal every process of the group that still exists."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    async def end(self, term_s: float) -> int:
        """SIGTERM, `term_s` later SIGKILL, to the whole group; the leader's exit status."""
        self.signal_group(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.process.wait(), term_s)
        except TimeoutError:
            self.signal_group(signal.SIGKILL)
        status = await self.process.wait()
        await self.sweep()
        return status

    async def sweep(self) -> None:
        """Kill what the leader left in its group, and wait until the group is empty.

        A process that is dead but that nobody reaps counts as one for ever, hence the limit.
        """
        for _ in range(_SWEEPS_MAX):
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                return
            await asyncio.sleep(_GROUP_POLL_S)


async def spawn(module: str, arguments: list[str], environment: Mapping[str, str], log_path: str) -> EngineProcess:
    """Run `python -m module` with one end of a socket pair as `--channel-fd`."""
    ours, theirs = socket.socketpair()
    path = Path(log_path) if log_path else Path(tempfile.mkstemp(prefix="sglang-", suffix=".log")[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    with theirs, path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            f"--channel-fd={theirs.fileno()}",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **environment},
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            preexec_fn=_die_with(os.getpid()),
        )
    return EngineProcess(process=process, channel=ours, log_path=path)


def _die_with(parent: int) -> Callable[[], None]:
    """A hook for the child: the kernel kills it when the thread that started it ends.

    The closing of the channel is the second guard, for parents whose starting thread outlives their purpose.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def arm() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the line above
            os._exit(1)

    return arm
