"""Whatever a client sends gets a fitting status, and the gateway lives on."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import tiny_tokenizer
from gateway_harness import Bench, bench, failure
from scripted_nodes import MAX_CONTEXT, MAX_PROMPT, VOCABULARY, ids_bytes
from waiting import eventually

from evolving.v1 import common_pb2, gateway_pb2
from evolving.wire.status import parse_error

Request = gateway_pb2.GenerateRequest
Sampling = gateway_pb2.Sampling
Message = gateway_pb2.ChatMessage
Branch = common_pb2.BranchMetadata
INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
GOOD = ids_bytes([1, 2, 3])
METHODS = {
    "Generate": gateway_pb2.GenerateRequest,
    "EndBranches": gateway_pb2.EndBranchesRequest,
    "GetBranch": gateway_pb2.GetBranchRequest,
    "ListModels": gateway_pb2.ListModelsRequest,
}


@pytest.fixture
async def it(tmp_path: Path) -> AsyncIterator[Bench]:
    tiny_tokenizer.write(tmp_path)
    async with bench("n", tokenizer_path=tmp_path) as running:
        yield running


def chat(*messages: gateway_pb2.ChatMessage) -> gateway_pb2.ChatPrompt:
    return gateway_pb2.ChatPrompt(messages=messages)


BAD = {
    "no prompt": (Request(), INVALID, "EMPTY_PROMPT"),
    "empty text": (Request(text=""), INVALID, "EMPTY_PROMPT"),
    "empty ids": (Request(token_ids=b""), INVALID, "EMPTY_PROMPT"),
    "no messages": (Request(chat=chat()), INVALID, "EMPTY_PROMPT"),
    "odd bytes": (Request(token_ids=GOOD + b"x"), INVALID, "BAD_TOKENS"),
    "id out of vocabulary": (Request(token_ids=ids_bytes([1, VOCABULARY])), INVALID, "BAD_TOKENS"),
    "message with odd bytes": (Request(chat=chat(Message(role="user", token_ids=b"123"))), INVALID, "BAD_TOKENS"),
    "message without role": (Request(chat=chat(Message(content="x"))), INVALID, "INVALID_REQUEST"),
    "message the template refuses": (Request(chat=chat(Message(role="bad"))), INVALID, "BAD_MESSAGES"),
    "prompt too long": (Request(token_ids=ids_bytes([1] * (MAX_PROMPT + 1))), INVALID, "PROMPT_TOO_LONG"),
    "text too long": (Request(text="x" * (MAX_PROMPT + 1)), INVALID, "PROMPT_TOO_LONG"),
    "unknown model": (Request(model="huge", token_ids=GOOD), NOT_FOUND, "UNKNOWN_MODEL"),
    "long request id": (Request(request_id="x" * 257, token_ids=GOOD), INVALID, "INVALID_REQUEST"),
    "control characters": (Request(request_id="a\nb", token_ids=GOOD), INVALID, "INVALID_REQUEST"),
    "long branch id": (Request(token_ids=GOOD, branch=Branch(branch_id="é" * 129)), INVALID, "INVALID_REQUEST"),
    "version of no branch": (Request(token_ids=GOOD, branch=Branch(version=2)), INVALID, "INVALID_REQUEST"),
    "its own parent": (
        Request(token_ids=GOOD, branch=Branch(branch_id="b", parent_branch_id="b")),
        INVALID,
        "INVALID_REQUEST",
    ),
    "priority": (Request(token_ids=GOOD, priority=101), INVALID, "INVALID_REQUEST"),
    "resume without ids": (Request(token_ids=GOOD, resume_from=2), INVALID, "INVALID_REQUEST"),
    "resume ids too many": (Request(token_ids=GOOD, resume_token_ids=GOOD), INVALID, "INVALID_REQUEST"),
    "resume id out of vocabulary": (
        Request(token_ids=GOOD, resume_from=1, resume_token_ids=ids_bytes([VOCABULARY])),
        INVALID,
        "BAD_TOKENS",
    ),
    "resume past the context": (
        Request(token_ids=GOOD, resume_from=MAX_CONTEXT, resume_token_ids=ids_bytes([1] * MAX_CONTEXT)),
        INVALID,
        "PROMPT_TOO_LONG",
    ),
}
BAD_SAMPLING = {
    "temperature": Sampling(temperature=-0.1),
    "temperature nan": Sampling(temperature=math.nan),
    "temperature inf": Sampling(temperature=math.inf),
    "top_p": Sampling(top_p=1.1),
    "min_p": Sampling(min_p=-0.1),
    "frequency_penalty": Sampling(frequency_penalty=2.1),
    "presence_penalty": Sampling(presence_penalty=-2.1),
    "repetition_penalty": Sampling(repetition_penalty=2.1),
    "stops": Sampling(stop=["x"] * 17),
    "empty stop": Sampling(stop=[""]),
    "stop ids": Sampling(stop_token_ids=range(65)),
}


async def served(it: Bench) -> None:
    """The gateway still works."""
    await it.generate([1, 2, 3], sampling=Sampling(max_tokens=2)).all()


@pytest.mark.parametrize("case", BAD)
async def test_bad_requests(it: Bench, case: str) -> None:
    request, status, reason = BAD[case]
    detail = parse_error(await failure(it.generate(request=request).all()))
    assert (detail.status, detail.reason) == (status, reason)
    assert it.nodes["n"].prefills == []
    assert it.directory.begins == []
    await served(it)


@pytest.mark.parametrize("case", BAD_SAMPLING)
async def test_bad_sampling(it: Bench, case: str) -> None:
    stream = it.generate([1, 2, 3], sampling=BAD_SAMPLING[case])
    detail = parse_error(await failure(stream.all()))
    assert detail.status is INVALID
    assert it.nodes["n"].prefills == []


async def test_text_needs_a_tokenizer() -> None:
    async with bench("n") as it:
        detail = parse_error(await failure(it.generate(text="hi").all()))
        assert (detail.status, detail.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NO_TOKENIZER")
        await served(it)


async def test_without_nodes_nothing_is_served_and_health_says_so() -> None:
    async with bench() as it:
        detail = parse_error(await failure(it.generate([1, 2, 3]).all()))
        assert (detail.status, detail.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_NODE")
        assert detail.retry_after_s is not None
        assert not it.service.ready.ready


async def test_several_models_need_a_name() -> None:
    async with bench("a", "b") as it:
        await it.register(it.nodes["b"], model="other")
        async with asyncio.timeout(10):
            while len((await it.stub.ListModels(gateway_pb2.ListModelsRequest())).models) < 2:
                await asyncio.sleep(0.01)
        detail = parse_error(await failure(it.generate([1, 2, 3]).all()))
        assert (detail.status, detail.reason) == (INVALID, "MODEL_NOT_NAMED")
        stream = it.generate([1, 2, 3], model="other", sampling=Sampling(max_tokens=2))
        assert (await stream.all()).prefill_node_id == "b"


async def test_end_and_get_check_their_ids(it: Bench) -> None:
    end, get = it.stub.EndBranches, it.stub.GetBranch
    too_many = gateway_pb2.EndBranchesRequest(branch_ids=[str(number) for number in range(1001)])
    for call in (
        end(too_many),
        end(gateway_pb2.EndBranchesRequest(branch_ids=[""])),
        get(gateway_pb2.GetBranchRequest()),
    ):
        assert (await failure(call)).code() is INVALID
    assert await end(gateway_pb2.EndBranchesRequest()) == gateway_pb2.EndBranchesResponse()
    assert it.directory.ended == []


def raw(it: Bench, method: str) -> Any:
    """A method whose request is bytes."""
    make = it.channel.unary_stream if method == "Generate" else it.channel.unary_unary
    return make(f"/evolving.v1.GatewayService/{method}", request_serializer=None, response_deserializer=None)


async def outcome(it: Bench, method: str, data: bytes) -> grpc.StatusCode:
    """The status a method answers these bytes with."""
    call = raw(it, method)(data, timeout=30)
    if method == "Generate":
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError:
            pass
    code: grpc.StatusCode = await call.code()
    return code


async def test_invalid_utf8_is_refused(it: Bench) -> None:
    text_field = b"\x1a\x02\xff\xfe"  # field 3, two bytes that no text has
    assert await outcome(it, "Generate", text_field) is INVALID
    assert await outcome(it, "GetBranch", b"\x0a\x01\xff") is INVALID
    await served(it)


async def test_a_message_too_large_is_refused(tmp_path: Path) -> None:
    async with bench("n", max_message_bytes=64 * 1024) as it:
        assert await outcome(it, "Generate", Request(token_ids=bytes(80_000)).SerializeToString()) is (
            grpc.StatusCode.RESOURCE_EXHAUSTED
        )
        await served(it)


async def test_an_expired_deadline_does_no_work(it: Bench) -> None:
    error = await failure(it.generate([1, 2, 3], timeout=0.0).all())
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await served(it)
    assert len(it.nodes["n"].prefills) == 1


@pytest.mark.slow
async def test_ten_thousand_random_byte_strings(it: Bench) -> None:
    """Bytes at random, and valid requests with bytes changed, to every method."""
    dice = random.Random(2611)
    sample = Request(text="hello", request_id="r", sampling=Sampling(max_tokens=2), branch=Branch(branch_id="b"))
    fitting = {
        grpc.StatusCode.OK,
        INVALID,
        NOT_FOUND,
        grpc.StatusCode.ABORTED,  # two of them had one request id
        grpc.StatusCode.FAILED_PRECONDITION,
    }
    seen: dict[grpc.StatusCode, int] = {}

    async def throw(count: int) -> None:
        for _ in range(count):
            method = dice.choice([*METHODS, "Generate"])
            if dice.random() < 0.5:
                data = dice.randbytes(dice.randrange(0, 60))
            else:
                changed = bytearray(sample.SerializeToString())
                for _ in range(dice.randrange(1, 4)):
                    changed[dice.randrange(len(changed))] = dice.randrange(256)
                data = bytes(changed)
            status = await outcome(it, method, data)
            seen[status] = seen.get(status, 0) + 1
            assert status in fitting, (status, method, data)

    async with asyncio.TaskGroup() as group:
        for _ in range(20):
            group.create_task(throw(500))
    assert sum(seen.values()) == 10_000
    await served(it)
    await eventually(lambda: not it.nodes["n"].running)
    begun = {begin.request_id for begin in it.directory.begins if begin.branch.branch_id}
    await eventually(lambda: {done.request_id for done in it.directory.finished} == begun)
