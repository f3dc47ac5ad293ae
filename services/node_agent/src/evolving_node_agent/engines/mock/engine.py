"""The engine port over lives that start, crash and stop."""

from __future__ import annotations

import asyncio
import hashlib
import os
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial

from evolving.core.pool_runs import Use
from evolving.runtime.clock import Clock, SystemClock
from evolving_node_agent.engines.mock.cache import BlockCache
from evolving_node_agent.engines.mock.config import MockConfig
from evolving_node_agent.engines.mock.faults import Faults
from evolving_node_agent.engines.mock.fetch import fetch, offered_blocks, serve_reads
from evolving_node_agent.engines.mock.life import Life
from evolving_node_agent.engines.mock.transfer import dismiss, dismissed, pull, serve_claim
from evolving_node_agent.engines.mock.transport import Claim, Connection, Disconnected, Dismiss, Read
from evolving_node_agent.engines.port import (
    Aborted,
    DecodeEvent,
    DecodeJob,
    EngineDown,
    EngineError,
    EngineInfo,
    EngineStatus,
    KvEvent,
    PrefillEvent,
    PrefillJob,
    Tier,
)


class MockEngine:
    """An `Engine` (see port.py) without a model, in this process."""

    def __init__(self, config: MockConfig, clock: Clock | None = None, faults: Faults | None = None) -> None:
        self.config = config
        self.faults = faults or Faults(config.faults)
        self.faults.on_crash = self._crash
        self._clock = clock or SystemClock()
        self._cache = BlockCache(config)
        self._life: Life | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._exit: asyncio.Future[int] | None = None

    # -- life and death

    async def start(self) -> EngineInfo:
        """Begin a new life. What L2 held before a crash is still there, where the configuration says so."""
        assert self._life is None, "start follows stop or a crash"
        if self.faults.fail_starts > 0:
            self.faults.fail_starts -= 1
            raise EngineError("the engine was told to fail this start")
        life = Life(self.config, self._clock, self.faults, self._cache, uuid.uuid4().hex)
        self._server = await asyncio.start_server(partial(self._accept, life), self.config.host, 0)
        port = self._server.sockets[0].getsockname()[1]
        life.address = f"{self.config.advertise_host or self.config.host}:{port}"
        self._life = life
        self._exit = asyncio.get_running_loop().create_future()
        self._loop_task = asyncio.create_task(self._run(life))
        return self._info(life)

    async def stop(self, grace_s: float) -> None:
        """Take no more legs, give running ones `grace_s`, then end everything. L2 is lost too."""
        life = self._life
        if life is not None:
            life.shut(EngineDown("the engine is stopping"))
            deadline_s = self._clock.now_s() + grace_s
            while life.legs and self._life is life and self._clock.now_s() < deadline_s:
                await self._clock.sleep(min(0.02, grace_s))
            self._end_life(EngineDown("the engine was stopped"))
            await life.wait_ended()
        for task in list(self._connections):
            await asyncio.wait([task])
        self._cache = BlockCache(self.config)

    async def exited(self) -> int:
        """Wait for a crash; its status."""
        assert self._exit is not None, "exited follows start"
        return await asyncio.shield(self._exit)

    def _crash(self, status: int) -> None:
        if self._life is None:
            return
        self._end_life(EngineDown(f"the engine exited with status {status}"))
        if self.config.l2_survives_crash:
            pool = self._cache.pool
            pool.lose(Tier.L1)
            pool.forget_needs()
            self._cache.take_events()  # the next life says what is held
        else:
            self._cache = BlockCache(self.config)
        if self._exit is not None and not self._exit.done():
            self._exit.set_result(status)

    def _end_life(self, error: EngineDown) -> None:
        life, self._life = self._life, None
        if life is None:
            return
        life.kill(error)
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        if self._loop_task is not None:  # also where it is the loop itself that crashes: it must not iterate on
            self._loop_task.cancel()

    async def _run(self, life: Life) -> None:
        try:
            await life.run()
        except Exception:
            self._crash(1)  # as an engine process would die of a bug; the traceback follows
            raise

    def _info(self, life: Life) -> EngineInfo:
        config = self.config
        return EngineInfo(
            incarnation=life.incarnation,
            model=config.model,
            kv_format=config.kv_format,
            block_tokens=config.block_tokens,
            vocab_size=config.vocab_size,
            max_prompt_tokens=config.max_prompt_tokens,
            max_context_tokens=config.max_context_tokens,
            l1_tokens=config.l1_tokens,
            reserve_tokens=config.reserve_tokens,
            l2_tokens=config.l2_tokens,
            decode_slots=config.decode_slots,
            chunk_tokens=config.chunk_tokens,
            kv_bytes_per_token=config.page_bytes // config.block_tokens,
            transfer_address=life.address,
            pool_address=life.address,
            pid=os.getpid(),
            experts=config.decode.experts,
            experts_per_token=config.decode.experts_per_token,
        )

    # -- legs

    async def prefill(self, job: PrefillJob) -> AsyncIterator[PrefillEvent]:
        """See port.py."""
        life = self._living()
        leg = life.add_prefill(job, offered_blocks, partial(fetch, life))
        try:
            async for event in leg.events:
                yield event
        finally:
            life.end(leg, Aborted("the iterator was closed"))

    async def decode(self, job: DecodeJob) -> AsyncIterator[DecodeEvent]:
        """See port.py."""
        life = self._living()
        leg = life.add_decode(job, partial(pull, life), partial(dismiss, life))
        try:
            async for event in leg.events:
                yield event
        finally:
            life.end(leg, Aborted("the iterator was closed"))

    async def abort(self, leg_id: str) -> bool:
        """See port.py."""
        leg = self._life.legs.get(leg_id) if self._life is not None else None
        if self._life is None or leg is None:
            return False
        self._life.end(leg, Aborted(f"leg {leg_id} was aborted"))
        return True

    # -- what is seen and set

    def status(self) -> EngineStatus:
        """See port.py; empty while the engine is down."""
        return self._life.status() if self._life is not None else EngineStatus()

    async def status_changes(self) -> AsyncIterator[EngineStatus]:
        """See port.py; ends with the life."""
        async for status in self._living().status_readers.read():
            yield status

    async def kv_events(self) -> AsyncIterator[Sequence[KvEvent]]:
        """See port.py; ends with the life."""
        async for events in self._living().kv_readers.read():
            yield events

    async def set_needs(self, needs: Mapping[bytes, int]) -> None:
        """See port.py."""
        self._living()
        self._cache.pool.set_needs(needs)

    async def needs(self) -> Mapping[bytes, int]:
        """See port.py."""
        self._living()
        return self._cache.pool.needs()

    async def free_l1(self) -> int:
        """See port.py."""
        life = self._living()
        dropped = self._cache.pool.free_l1()
        life.publish()
        return dropped

    async def clear(self) -> int:
        """See port.py."""
        life = self._living()
        dropped = self._cache.pool.clear()
        life.publish()
        return dropped

    async def block_digests(self, names: Sequence[bytes], tier: Tier) -> Mapping[bytes, bytes]:
        """See port.py."""
        self._living()
        copies = {name: self._cache.read(name, tier) for name in names}
        return {name: hashlib.sha256(data).digest() for name, data in copies.items() if data is not None}

    def damage(self, name: bytes, tier: Tier) -> None:
        """Flip a bit of a copy, as failing memory would."""
        self._cache.damage(name, tier)

    def kept_for_legs(self) -> int:
        """Blocks that legs keep from eviction, each once; 0 at rest."""
        return sum(self._cache.pool.used_by(use) for use in Use)

    def check_invariants(self) -> None:
        """Assert the bookkeeping of what is held; O(blocks)."""
        self._cache.check_invariants()

    def _living(self) -> Life:
        if self._life is None:
            raise EngineDown("the engine is not running")
        return self._life

    # -- what other engines ask

    def _accept(self, life: Life, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection in a task that the end of the life ends, however early it comes."""
        connection = Connection(reader, writer, self.config.stalled_transport_s)
        task = asyncio.create_task(_serve(life, connection))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        task.add_done_callback(lambda _: writer.close())  # also where it was cancelled before it began
        if self._life is not life:
            task.cancel()


async def _serve(life: Life, connection: Connection) -> None:
    try:
        match await connection.receive():
            case Claim() as claim:
                await serve_claim(life, connection, claim)
            case Dismiss(transfer_id):
                dismissed(life, transfer_id)
            case Read() as request:
                await serve_reads(life, connection, request)
    except Disconnected:
        return  # whoever asked is gone; a leg that this concerns was ended where it was noticed
    finally:
        await connection.close()
