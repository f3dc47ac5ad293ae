"""What the agent does when its engine comes up and goes down."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from evolving.runtime.keys import Keys, NodeRegistration, encode
from evolving.runtime.registration import Registration
from evolving.runtime.service import Service
from evolving.runtime.store import Store
from evolving_node_agent.engines.port import EngineDown, EngineInfo, EngineStatus
from evolving_node_agent.node import Node
from evolving_node_agent.reporter import DirectoryReporter
from evolving_node_agent.settings import NodeAgentSettings
from evolving_node_agent.work import WorkReporter


class EngineLives:
    """Brings each life of the engine into the cluster, and takes it out again."""

    def __init__(
        self,
        service: Service[NodeAgentSettings],
        store: Store,
        keys: Keys,
        address: str,
        node: Node,
        directory: DirectoryReporter,
        work: WorkReporter,
    ) -> None:
        self._service = service
        self._store = store
        self._keys = keys
        self._address = address
        self._node = node
        self._directory = directory
        self._work = work
        self._registration: Registration | None = None
        self._tasks: list[asyncio.Task[None]] = []  # of the running life

    async def up(self, info: EngineInfo) -> None:
        """A life began: follow it, tell the directory, register it. Raises EngineDown when it is over already."""
        self._work.begin_life(info.incarnation)
        await self._directory.begin_life(info)
        self._node.engine_up(info)
        self._tasks = [
            self._service.spawn(_while_up(self._node.follow_engine(self._ran)), "engine_status"),
            self._service.spawn(_while_up(self._directory.follow_kv()), "engine_kv"),
            self._service.spawn(self._register(info), "register"),
        ]
        self._service.ready.set("engine", True)

    async def down(self) -> None:
        """The life ended. Its registration stays: the next life replaces it, and nobody sends work here meanwhile."""
        self._service.ready.set("engine", False, "the engine is not running")
        self._service.ready.set("registered", False, "the engine is not running")
        self._node.engine_down()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks = []
        # An engine that is about to be stopped has more to say than it told last; one that crashed hasn't.
        self._work.end_life(self._node.engine.status().ran)
        self._directory.end_life()

    def _ran(self, status: EngineStatus) -> None:
        self._work.ran(status.ran)

    async def drain(self) -> None:
        """Others stop sending work here: the role says so, then the registration goes. Running legs go on."""
        self._node.roles.drain()
        self._node.close()
        if self._registration is not None:
            await self._registration.close()

    async def _register(self, info: EngineInfo) -> None:
        settings = self._service.settings
        value = encode(self._record(info))
        if self._registration is None:
            key = self._keys.node(settings.node_id)
            self._registration = self._store.register(key, value, settings.registration_ttl_s)
            self._service.spawn(self._registration.wait_closed(), f"registration:{key}")
            await self._registration.wait_registered()
        else:
            await self._registration.update(value)
        self._node.set_registered()
        self._service.ready.set("registered", True)

    def _record(self, info: EngineInfo) -> NodeRegistration:
        prefill, decode = self._node.time_model.configured_prefill, self._node.time_model.configured_decode
        return NodeRegistration(
            node_id=self._node.node_id,
            incarnation=info.incarnation,
            address=self._address,
            model=info.model,
            kv_format=info.kv_format,
            block_tokens=info.block_tokens,
            vocab_size=info.vocab_size,
            max_prompt_tokens=info.max_prompt_tokens,
            max_context_tokens=info.max_context_tokens,
            l1_tokens=info.l1_tokens,
            reserve_tokens=info.reserve_tokens,
            l2_tokens=info.l2_tokens,
            decode_slots=info.decode_slots,
            chunk_tokens=info.chunk_tokens,
            kv_bytes_per_token=info.kv_bytes_per_token,
            transfer_address=info.transfer_address,
            pool_address=info.pool_address,
            prefill_coefficients=(prefill.c0_s, prefill.c1_s, prefill.c2_s, prefill.c3_s, prefill.c4_s),
            decode_coefficients=(decode.d0_s, decode.d1_s, decode.d2_s, decode.d3_s),
            experts=info.experts,
            experts_per_token=info.experts_per_token,
        )


async def _while_up(work: Coroutine[None, None, None]) -> None:
    """Follow a life to its end, however soon that is."""
    try:
        await work
    except EngineDown:
        return
