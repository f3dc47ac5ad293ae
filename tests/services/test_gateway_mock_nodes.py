"""A gateway over node agents with mock engines, all in the test's own loop: what becomes of a request's two legs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizer
from etcd_process import Etcd
from gateway_harness import Stream
from node_agent_harness import Agent, agent, scripted_planner
from planner_harness import KEYS, open_store
from running import running
from scripted_nodes import ids_bytes
from waiting import WAIT_S, eventually

from evolving.internal.v1 import planner_pb2
from evolving.runtime.channel import open_channel
from evolving.runtime.clock import SystemClock
from evolving.runtime.etcd import EtcdStore
from evolving.runtime.keys import Role, Split, encode
from evolving.runtime.service import Service
from evolving.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from evolving_gateway.__main__ import run_gateway
from evolving_gateway.settings import GatewaySettings

PROMPT = list(range(1, 301))
OTHER_PROMPT = list(range(301, 401))


@dataclass
class Nodes:
    """A gateway and its nodes."""

    agents: dict[str, Agent]
    service: Service[GatewaySettings]
    stub: gateway_pb2_grpc.GatewayServiceAsyncStub
    store: EtcdStore

    async def split(self, epoch: int, **roles: Role) -> None:
        """Set the split, and wait until the gateway goes by it."""
        await self.store.put(KEYS.split, encode(Split(epoch, dict(roles), "test", "test", 0.0)))
        await eventually(
            lambda: self.service.metrics.registry.get_sample_value("evolving_gateway_split_epoch") == epoch
        )

    def generate(self, prompt: list[int], tokens: int, *stop: str, request_id: str = "") -> Stream:
        """Call Generate."""
        sampling = gateway_pb2.Sampling(max_tokens=tokens, ignore_eos=True, stop=stop)
        request = gateway_pb2.GenerateRequest(request_id=request_id, token_ids=ids_bytes(prompt), sampling=sampling)
        return Stream(self.stub.Generate(request, timeout=WAIT_S))

    def computed(self) -> int:
        """Prompt tokens computed by all nodes."""
        return sum(each.engine.status().prefill_tokens for each in self.agents.values())


@asynccontextmanager
async def nodes(etcd: Etcd, *names: str, mock: dict[str, Any], **settings: object) -> AsyncIterator[Nodes]:
    """A gateway that sees these nodes, ready to serve."""
    values = {"metrics_listen": "", "grace_s": 5.0, "etcd_endpoints": etcd.endpoints, **settings}
    service = Service(GatewaySettings(**values), SystemClock())
    async with contextlib.AsyncExitStack() as stack:
        agents = {name: await stack.enter_async_context(agent(etcd, name, mock)) for name in names}
        for each in agents.values():
            await each.ready()
        store = await stack.enter_async_context(open_store(etcd))
        await stack.enter_async_context(running(service, run_gateway(service, store)))
        channel = await stack.enter_async_context(open_channel(service.address))
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)

        async def all_there() -> bool:
            models = (await stub.ListModels(gateway_pb2.ListModelsRequest())).models
            return sum(model.nodes for model in models) == len(names)

        await eventually(all_there)
        yield Nodes(agents, service, stub, store)


@pytest.mark.parametrize("why", ["switched", "no room"])
async def test_a_request_that_waits_for_room_moves_and_its_prompt_is_computed_once(etcd: Etcd, why: str) -> None:
    """The one who has the slot goes on where it is."""
    mock = {"decode_slots": 1, "speed_up": 2.0}
    deadline_s = 0.2 if why == "no room" else 1000.0
    async with nodes(etcd, "p", "d", "e", mock=mock, reserve_deadline_s=deadline_s) as it:
        await it.split(1, p="prefill", d="decode", e="prefill")
        in_the_slot = it.generate(OTHER_PROMPT, 1500)
        await in_the_slot.until(lambda: len(in_the_slot.ids) > 1)
        before = it.computed()
        stream = it.generate(PROMPT, 8)
        await stream.until(lambda: bool(stream.ids))
        if why == "switched":
            await it.split(2, p="prefill", d="prefill", e="decode")
        finished = await stream.all()
        assert it.computed() - before == len(PROMPT)
        assert finished.attempts == 0
        assert finished.decode_node_id != "d"
        assert why == "no room" or finished.decode_node_id == "e"
        assert in_the_slot.finished is None
        in_the_slot.call.cancel()
        undisturbed = it.generate(PROMPT, 8)
        await undisturbed.all()
        assert stream.ids == undisturbed.ids


async def test_an_output_that_a_stop_text_ends_is_reported_to_the_planner(etcd: Etcd, tmp_path: Path) -> None:
    """The gateway finds it and ends the decode leg; the engine did the work all the same."""
    mock = {"speed_up": 2.0, "vocab_size": tiny_tokenizer.write(tmp_path).get_vocab_size()}
    prompt = [token % 200 for token in PROMPT]
    async with scripted_planner(etcd) as planner, nodes(etcd, "p", "d", mock=mock, tokenizer_path=tmp_path) as it:
        await it.split(1, p="prefill", d="decode")
        whole = await it.generate(prompt, 60, request_id="whole").all()
        stop = whole.text[20:23]
        assert stop not in whole.text[:20]
        finished = await it.generate(prompt, 1500, stop, request_id="stopped").all()
        assert finished.reason == gateway_pb2.FINISH_REASON_STOP
        assert whole.text.startswith(finished.text)
        output_tokens = finished.usage.output_tokens

        def samples(name: str) -> list[planner_pb2.WorkSample]:
            phase = common_pb2.PHASE_DECODE
            return [each for each in planner.samples if (each.request_id, each.phase) == (name, phase)]

        await eventually(lambda: bool(samples("whole") and samples("stopped")))
        (sample,) = samples("stopped")
        assert output_tokens - 1 <= sample.output_tokens == sample.iterations < 1500
