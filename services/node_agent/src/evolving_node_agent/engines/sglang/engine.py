"""The engine port over one SGLang process."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from evolving_node_agent.engines import port
from evolving_node_agent.engines.port import (
    EngineDown,
    EngineError,
    EngineInfo,
    EngineStatus,
    Finished,
    Prefilled,
    PrefillEvent,
    Sent,
    Tier,
)

from . import messages as m
from .config import SglangConfig, refuse_strangers
from .framing import read_frame, write_frame
from .process import EngineProcess, spawn
from .translate import check_job, decode_command, error_of, event_of, kv_events_of, prefill_command

HOST_MODULE = "evolving_node_agent.engines.sglang.host"
_TERM_S = 5.0
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(m.Report).decode

LegEvent = PrefillEvent | port.DecodeEvent


class SglangEngine:
    """`port.Engine` with SGLang behind it. One process a start; `start` may be called again after it exited."""

    def __init__(self, config: SglangConfig, secret: bytes = b"") -> None:
        """`secret`: what nodes of the cluster know each other by; empty: none. Raises ValueError when the transport
        needs one."""
        if config.transport == "tcp":
            refuse_strangers(config.bind_host, secret)
        self._config = config
        self._secret = secret
        self._process: EngineProcess | None = None
        self._life: _Life | None = None
        self._stopping = False

    async def start(self) -> EngineInfo:
        """Start the process and wait until it serves. Raises EngineError with the tail of its log."""
        if self._life is not None and not self._life.over:
            raise EngineError("the engine is running")
        self._stopping = False
        self._process = await spawn(HOST_MODULE, self._arguments(), {}, self._config.log_path)
        reader, writer = await asyncio.open_connection(sock=self._process.channel)
        write_frame(writer, self._secret)
        self._life = _Life(self._process, reader, writer)
        try:
            return await asyncio.wait_for(self._life.info(), self._config.start_timeout_s)
        except (EngineError, TimeoutError) as error:
            await self._process.end(0.1)
            await self._life.closed()
            tail = self._process.log_tail()
            raise EngineError(f"the engine did not start: {error!r}\n{tail}") from error
        except asyncio.CancelledError:
            await self._process.end(0.1)
            raise

    def _arguments(self) -> list[str]:
        return [f"--config={json.dumps(asdict(self._config))}"]

    async def stop(self, grace_s: float) -> None:
        """Let running legs end within `grace_s`, then end the process group. Idempotent."""
        life, process = self._life, self._process
        if life is None or process is None:
            return
        self._stopping = True
        if not life.over:
            life.send(m.Drain())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(life.closed(), grace_s)
        await process.end(_TERM_S)
        await life.closed()

    async def exited(self) -> int:
        """Wait until the process is gone without `stop`; its exit status (negative: signal)."""
        life, process = self._life, self._process
        if life is None or process is None:
            raise EngineDown("the engine was not started")
        await life.closed()
        # A closed channel is the end of its usefulness, whatever else it does.
        status = await process.end(_TERM_S)
        if self._stopping:
            await asyncio.Event().wait()
        return status

    async def prefill(self, job: port.PrefillJob) -> AsyncIterator[PrefillEvent]:
        """Taken, Prefilled, then Sent (or nothing more when `finish` is set)."""
        life = self._alive()
        check_job(job, life.facts)
        async with contextlib.aclosing(life.leg(job.leg_id, prefill_command(job))) as events:
            async for event in events:
                assert isinstance(event, PrefillEvent)
                yield event
                if isinstance(event, Sent) or (isinstance(event, Prefilled) and event.finish is not None):
                    return

    async def decode(self, job: port.DecodeJob) -> AsyncIterator[port.DecodeEvent]:
        """Reserved, Started, Tokens…, Finished."""
        life = self._alive()
        check_job(job, life.facts)
        async with contextlib.aclosing(life.leg(job.leg_id, decode_command(job))) as events:
            async for event in events:
                assert isinstance(event, port.DecodeEvent)
                yield event
                if isinstance(event, Finished):
                    return

    async def abort(self, leg_id: str) -> bool:
        """End a leg of either phase in any stage; False: no such leg."""
        life = self._life
        if life is None or life.over:
            return False
        try:
            return (await life.ask(lambda request: m.Abort(request, leg_id))).found
        except EngineDown:
            return False

    def status(self) -> EngineStatus:
        """The newest status; the empty one before the first start."""
        return self._life.status if self._life is not None else EngineStatus()

    async def status_changes(self) -> AsyncIterator[EngineStatus]:
        """Each new status of this life of the process; ends with it."""
        life = self._alive()
        seen = 0
        while await life.status_after(seen):
            seen = life.status_version
            yield life.status

    async def kv_events(self) -> AsyncIterator[Sequence[port.KvEvent]]:
        """Changes of this life of the process, from its beginning; ends with it. For one reader."""
        life = self._alive()
        while (batch := await life.kv_batches.get()) is not None:
            yield batch

    async def set_needs(self, needs: Mapping[bytes, int]) -> None:
        """Replace the needs of the named blocks (0 forgets one). Returns when eviction goes by them."""
        await self._alive().ask(lambda request: m.SetNeeds(request, dict(needs)))

    async def needs(self) -> Mapping[bytes, int]:
        """The nonzero needs eviction goes by now."""
        return (await self._alive().ask(m.AskNeeds)).needs

    async def free_l1(self) -> int:
        """Drop from L1 what L2 has too, blocks in use when their last leg ends; the blocks dropped at once."""
        return (await self._alive().ask(lambda request: m.Drop(request, l2=False))).blocks

    async def clear(self) -> int:
        """Drop everything from both tiers, blocks in use when their last leg ends; the blocks dropped at once."""
        return (await self._alive().ask(lambda request: m.Drop(request, l2=True))).blocks

    async def block_digests(self, names: Sequence[bytes], tier: Tier) -> Mapping[bytes, bytes]:
        """SHA-256 over the KV bytes of those of the named blocks the tier holds."""
        joined = b"".join(names)
        return (await self._alive().ask(lambda request: m.AskDigests(request, joined, int(tier)))).digests

    def _alive(self) -> _Life:
        if self._life is None or self._life.over or self._life.ready_info is None:
            raise EngineDown("the engine is not running")
        return self._life


class _Life:
    """One life of the process: its channel, and everything waiting on it."""

    def __init__(self, process: EngineProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process = process
        self._writer = writer
        self._legs: dict[str, asyncio.Queue[LegEvent | EngineError]] = {}
        self._questions: dict[int, asyncio.Future[m.Answer]] = {}
        self._next_request = 1
        self._info: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._info.add_done_callback(_observe)
        self._status_changed = asyncio.Condition()
        self.status = EngineStatus()
        self.status_version = 0
        self.kv_batches: asyncio.Queue[Sequence[port.KvEvent] | None] = asyncio.Queue()
        self.over = False
        self._reading = asyncio.create_task(self._read(reader))

    @property
    def ready_info(self) -> EngineInfo | None:
        """What the process said about itself, once it has."""
        return self._info.result() if self._info.done() and self._info.exception() is None else None

    @property
    def facts(self) -> EngineInfo:
        """As `ready_info`, of a process that serves."""
        info = self.ready_info
        assert info is not None
        return info

    async def info(self) -> EngineInfo:
        """Wait until the process serves. Raises EngineDown when it ends first."""
        return await asyncio.shield(self._info)

    async def closed(self) -> None:
        """Wait until the channel is closed."""
        await asyncio.wait([self._reading])

    def send(self, command: m.Command) -> None:
        """Send one command."""
        write_frame(self._writer, _encode(command))

    async def ask(self, question: Any) -> m.Answer:
        """Send a question with a fresh request number and wait for its answer. Raises EngineDown."""
        if self.over:
            raise EngineDown("the engine is not running")
        request = self._next_request
        self._next_request += 1
        answer: asyncio.Future[m.Answer] = asyncio.get_running_loop().create_future()
        self._questions[request] = answer
        self.send(question(request))
        try:
            return await answer
        finally:
            self._questions.pop(request, None)

    async def leg(self, leg_id: str, command: m.Prefill | m.Decode) -> AsyncGenerator[LegEvent]:
        """The leg's events until it fails or the reader stops reading, which aborts it."""
        if leg_id in self._legs:
            raise port.Rejected(f"leg {leg_id} is running already")
        if self.over:
            raise EngineDown("the engine is not running")
        events: asyncio.Queue[LegEvent | EngineError] = asyncio.Queue()
        self._legs[leg_id] = events
        self.send(command)
        ended = False
        try:
            while True:
                event = await events.get()
                ended = _is_last(event)
                if isinstance(event, EngineError):
                    raise event
                yield event
        finally:
            self._legs.pop(leg_id, None)
            if not ended and not self.over:
                self.send(m.Abort(0, leg_id))

    async def status_after(self, version: int) -> bool:
        """Wait for a status newer than `version`; False when the process is gone."""
        async with self._status_changed:
            await self._status_changed.wait_for(lambda: self.status_version > version or self.over)
            return not self.over

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while (frame := await read_frame(reader)) is not None:
                await self._take(_decode(frame))
        finally:
            await self._close()

    async def _take(self, report: m.Report) -> None:
        match report:
            case m.Ready(info):
                if not self._info.done():
                    self._info.set_result(info)
            case m.StatusChanged(status):
                async with self._status_changed:
                    self.status = status
                    self.status_version += 1
                    self._status_changed.notify_all()
            case m.KvChanged(events):
                self.kv_batches.put_nowait(kv_events_of(events))
            case m.Answer(request):
                answer = self._questions.get(request)
                if answer is not None and not answer.done():
                    answer.set_result(report)
            case m.LegFailed(leg_id, error, message):
                if leg_id in self._legs:
                    self._legs[leg_id].put_nowait(error_of(error, message))
            case _:
                if report.leg_id in self._legs:
                    self._legs[report.leg_id].put_nowait(event_of(report))

    async def _close(self) -> None:
        self.over = True
        self._writer.close()
        down = EngineDown("the engine process ended")
        if not self._info.done():
            self._info.set_exception(down)
        for events in self._legs.values():
            events.put_nowait(EngineDown("the engine process ended"))
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(EngineDown("the engine process ended"))
        self.kv_batches.put_nowait(None)
        async with self._status_changed:
            self._status_changed.notify_all()


def _is_last(event: LegEvent | EngineError) -> bool:
    if isinstance(event, Prefilled):
        return event.finish is not None
    return isinstance(event, Sent | Finished | EngineError)


def _observe(future: asyncio.Future[EngineInfo]) -> None:
    """Mark a failure as seen: whoever waits for the start also gets it."""
    if not future.cancelled():
        future.exception()


__all__ = ["SglangEngine"]
