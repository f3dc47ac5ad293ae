"""The other side of bench-switch: SGLang as it is, three nodes of it, and what its router would do."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from bench.switch_arm import NODES, START, Plan, measure
from bench.switch_figures import Phase, Switch
from bench.switch_load import BLOCK_TOKENS, CHUNK_TOKENS, OUTPUT_TOKENS, Turn, TurnFailed
from cluster import free_ports, kernel_start

SERVER = Path(__file__).with_name("upstream_server.py")
_START_S, _REQUEST_S, _RETRY_S = 300.0, 120.0, 0.05
_HOST = "127.0.0.1"


@dataclass(eq=False)
class Server:
    """One node of plain SGLang."""

    name: str
    phase: Phase
    port: int
    bootstrap_port: int
    log: Path
    process: subprocess.Popen[bytes] | None = None
    draining: bool = False
    running: int = 0  # requests of ours

    @property
    def address(self) -> str:
        """Its HTTP door."""
        return f"http://{_HOST}:{self.port}"

    @property
    def life(self) -> str | None:
        """Changes when the process does; None: it is gone."""
        return kernel_start(self.process.pid) if self.process else None

    def start(self, model: Path) -> None:
        """Without waiting."""
        command = [sys.executable, str(SERVER), f"--model-path={model}", f"--host={_HOST}", f"--port={self.port}"]
        command += [f"--page-size={BLOCK_TOKENS}", f"--chunked-prefill-size={CHUNK_TOKENS}"]
        command += [f"--disaggregation-mode={self.phase}", f"--disaggregation-bootstrap-port={self.bootstrap_port}"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def stop(self) -> None:
        """At once, with all its children."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@dataclass
class Upstream:
    """Sends both legs of each request, as SGLang's router does. A context stays with its prefill node while it can."""

    servers: Mapping[str, Server]
    http: aiohttp.ClientSession
    _homes: dict[str, str] = field(default_factory=dict)  # the prefill node of each context
    accepted_s: list[float] = field(default_factory=list)  # of each switch, until the node said it was done
    _rooms: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    async def turn(self, branch: str, prompt: tuple[int, ...], ideal_tokens: int, came: Callable[[int], None]) -> Turn:
        """See Target."""
        prefill = self._choose("prefill", self._homes.get(branch))
        decode = self._choose("decode", None)
        self._homes[branch] = prefill.name
        body = {
            "input_ids": prompt,
            "stream": True,
            "sampling_params": {"max_new_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True},
            "bootstrap_host": _HOST,
            "bootstrap_port": prefill.bootstrap_port,
            "bootstrap_room": next(self._rooms),
        }
        with _counted(prefill, decode):
            first, whole = await asyncio.gather(self._leg(prefill, body, came), self._leg(decode, body, came))
        if len(whole.output) != OUTPUT_TOKENS:
            raise TurnFailed(f"{len(whole.output)} tokens")
        again = max(0, ideal_tokens - first.cached_tokens)
        return Turn(
            whole.output,
            min(first.reached_s(1), whole.reached_s(1)),
            whole.reached_s(2),
            0.0,
            prefill.name,
            decode.name,
            Counter({"computed": again}),
        )

    async def end(self, branch: str) -> None:
        """See Target; upstream is told nothing."""
        self._homes.pop(branch, None)

    async def switch(self, node: str, phase: Phase, waiting: Callable[[], int]) -> Switch:
        """Ask whether it would; where it is refused, send the node nothing new, let it finish, and ask until it does.

        From the first asking on.
        """
        server = self.servers[node]
        asked_s, waited = time.monotonic(), waiting()
        server.draining = True
        refusals = 0 if await self._asked(server, phase, prepare_only=True) else 1
        while server.running:
            await asyncio.sleep(_RETRY_S)
        while not await self._asked(server, phase, prepare_only=False):
            refusals += 1
            await asyncio.sleep(_RETRY_S)
        self.accepted_s.append(time.monotonic() - asked_s)
        server.phase, server.draining = phase, False
        return Switch(node, phase, asked_s, waited, refusals)

    async def _asked(self, server: Server, phase: Phase, *, prepare_only: bool) -> bool:
        ask = {"new_role": phase, "prepare_only": prepare_only, "decode_cuda_graph_memory_gb": 0.0}
        async with self.http.post(f"{server.address}/pd_role_switch", json=ask) as response:
            answer = await response.json()
        assert response.status == 200 or answer["safe_to_restore"], answer["message"]
        return response.status == 200

    def _choose(self, phase: Phase, wanted: str | None) -> Server:
        """The wanted one if it serves, else the one with the least to do."""
        serving = [server for server in self.servers.values() if server.phase == phase and not server.draining]
        return min(serving, key=lambda server: (server.name != wanted, server.running))

    async def _leg(self, server: Server, body: dict[str, Any], came: Callable[[int], None]) -> _Leg:
        """One of the two legs, read to its end."""
        leg = _Leg()
        try:
            async with self.http.post(f"{server.address}/generate", json=body) as response:
                if response.status != 200:
                    raise TurnFailed(f"{server.phase}: HTTP {response.status}")
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        leg.take(json.loads(line[len(b"data: ") :]))
                        came(len(leg.output))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise TurnFailed(f"{server.phase}: {type(error).__name__}") from error
        if not leg.came:
            raise TurnFailed(f"{server.phase}: no token")
        return leg


@dataclass(slots=True)
class _Leg:
    """What one leg's stream said."""

    output: tuple[int, ...] = ()
    cached_tokens: int = 0
    came: list[tuple[float, int]] = field(default_factory=list)  # (when, tokens by then)

    def take(self, message: dict[str, Any]) -> None:
        """One message of it. Raises TurnFailed where it says that the request was given up."""
        if "error" in message:
            raise TurnFailed("error in the stream")
        facts = message["meta_info"]
        if (facts.get("finish_reason") or {}).get("type") == "abort":
            raise TurnFailed("aborted")
        self.output = tuple(message["output_ids"])
        self.cached_tokens = facts["cached_tokens"]
        self.came.append((time.monotonic(), len(self.output)))

    def reached_s(self, tokens: int) -> float:
        """When there were so many."""
        return next(at_s for at_s, count in self.came if count >= tokens)


async def measure_upstream(model: Path, state: Path, plan: Plan) -> dict[str, Any]:
    """Start three nodes, measure them, stop them."""
    state.mkdir(parents=True, exist_ok=True)
    ports = iter(free_ports(2 * len(NODES)))
    servers = {
        name: Server(name, phase, next(ports), next(ports), state / f"{name}.log") for name, phase in START.items()
    }
    try:
        for server in servers.values():
            server.start(model)
        timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
            await asyncio.gather(*(_until_healthy(http, server) for server in servers.values()))
            before = {name: server.life for name, server in servers.items()}
            upstream = Upstream(servers, http)
            figures = await measure(upstream, upstream.switch, plan, "upstream", {})
        restarted = [name for name, server in servers.items() if server.life != before[name]]
        accepted = {"accepted_seconds_p50": statistics.median(upstream.accepted_s)}
        return {"engine": "upstream", **figures, **accepted, "restarted": restarted}
    finally:
        for server in servers.values():
            server.stop()


async def _until_healthy(http: aiohttp.ClientSession, server: Server) -> None:
    """Wait until it serves. Raises RuntimeError when it does not start."""
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < _START_S and server.life is not None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with http.get(f"{server.address}/health", timeout=aiohttp.ClientTimeout(total=5)) as response:
                if response.status == 200:
                    print(f"{server.name} serves after {time.monotonic() - begun_s:.0f} s", flush=True)
                    return
        await asyncio.sleep(0.5)
    raise RuntimeError(f"upstream's {server.name} did not start, see {server.log}")


@contextlib.contextmanager
def _counted(*servers: Server) -> Iterator[None]:
    """A request runs on these."""
    for server in servers:
        server.running += 1
    try:
        yield
    finally:
        for server in servers:
            server.running -= 1
