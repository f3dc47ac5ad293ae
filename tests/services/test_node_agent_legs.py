"""Legs over the wire of a node agent: what streams say, what is refused and how, back-pressure, cancellation."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import grpc
import grpc.aio
import pytest
from etcd_process import Etcd
from hostile import no_crash, send_random_bytes
from node_agent_harness import BLOCK, ROOT, Agent, agent, decode_request, ids, names_of, prefill_request
from waiting import WAIT_S

from evolving.internal.v1 import node_agent_pb2
from evolving.v1 import common_pb2, gateway_pb2
from evolving.wire.status import ErrorDetail, parse_error

SLOW = {"speed_up": 0.2}  # iterations of tens of milliseconds: legs stay where a test wants them


def sampling(**fields: Any) -> gateway_pb2.Sampling:
    """Sampling of eight tokens."""
    return gateway_pb2.Sampling(**({"max_tokens": 8, "ignore_eos": True} | fields))


async def refusal(call: Any) -> ErrorDetail:
    """How a call that must fail failed."""
    try:
        if isinstance(call, grpc.aio.UnaryUnaryCall):
            await call
        else:
            async for _ in call:
                pass
    except grpc.aio.AioRpcError as error:
        return parse_error(error)
    raise AssertionError("the call succeeded")


async def until_said(call: Any, kind: str) -> Any:
    """Read a stream up to an event of this kind."""
    async with asyncio.timeout(WAIT_S):
        async for response in call:
            if response.HasField(kind):
                return getattr(response, kind)
    raise AssertionError(f"the stream ended before {kind}")


async def test_two_agents_serve_a_request(etcd: Etcd) -> None:
    async with agent(etcd, "a") as a, agent(etcd, "b") as b:
        await a.ready()
        await b.ready()
        await a.set_split(7, "prefill")
        await a.status(lambda status: status.epoch == 7)
        prefilled, decoded, output = await a.serve(prefill_request(ids(1, 100)), b)
        assert [each.WhichOneof("event") for each in prefilled] == ["queued", "taken", "prefilled", "sent"]
        kinds = [each.WhichOneof("event") for each in decoded]
        assert kinds == ["reserved", "started", *["tokens"] * 7, "finished"]
        assert {each.epoch for each in prefilled} == {7}
        assert [each.tokens.index for each in decoded if each.HasField("tokens")] == list(range(1, 8))
        assert len(output) == 8 * 4
        assert decoded[-1].finished.reason == gateway_pb2.FINISH_REASON_LENGTH
        assert prefilled[2].prefilled.finish == gateway_pb2.FINISH_REASON_UNSPECIFIED
        assert prefilled[-1].sent.bytes > 0
        _, _, same = await b.serve(prefill_request(ids(1, 100)))
        assert same == output


async def test_a_request_of_one_token_has_no_decode_leg(etcd: Etcd) -> None:
    async with agent(etcd) as node:
        await node.ready()
        prefilled, decoded, output = await node.serve(prefill_request(ids(1, 50), sampling=sampling(max_tokens=1)))
        assert [each.WhichOneof("event") for each in prefilled] == ["queued", "taken", "prefilled"]
        assert prefilled[-1].prefilled.finish == gateway_pb2.FINISH_REASON_LENGTH
        assert (decoded, len(output)) == ([], 4)


async def test_unset_sampling_means_the_documented_defaults(etcd: Etcd) -> None:
    async with agent(etcd) as node:
        await node.ready()
        *_, plain = await node.serve(prefill_request(ids(1, 50), sampling=gateway_pb2.Sampling(max_tokens=6)))
        spelled = gateway_pb2.Sampling(max_tokens=6, temperature=0, top_p=1, repetition_penalty=1)
        *_, same = await node.serve(prefill_request(ids(1, 50), sampling=spelled))
        assert same == plain


async def test_a_resume_goes_on_at_its_index(etcd: Etcd) -> None:
    async with agent(etcd) as node:
        await node.ready()
        tokens = ids(1, 50)
        *_, whole = await node.serve(prefill_request(tokens))
        request = prefill_request(tokens + whole[:12], generated_tokens=3)
        _, decoded, rest = await node.serve(request)
        assert whole[:12] + rest == whole
        assert next(each.tokens.index for each in decoded if each.HasField("tokens")) == 4


GOOD = ids(2, 40)
BAD_FIELDS: list[dict[str, Any]] = [
    {"token_ids": b""},
    {"token_ids": GOOD + b"\x00"},
    {"token_ids": (1000).to_bytes(4, "little")},
    {"token_ids": ids(3, 1025)},
    {"token_ids": GOOD, "generated_tokens": 40},
    {"generated_tokens": 8},
    {"root": ROOT[:31]},
    {"root": b""},
    {"leg_id": ""},
    {"request_id": ""},
    {"leg_id": "x" * 257},
    {"branch_id": "x" * 257},
    {"request_id": "x" * 257},
    {"sampling": sampling(temperature=-1.0)},
    {"sampling": sampling(temperature=math.nan)},
    {"sampling": sampling(top_p=1.5)},
    {"sampling": sampling(min_p=-0.1)},
    {"sampling": sampling(frequency_penalty=3.0)},
    {"sampling": sampling(presence_penalty=-3.0)},
    {"sampling": sampling(repetition_penalty=-1.0)},
    {"sampling": sampling(stop_token_ids=range(65))},
]


async def test_bad_legs_are_refused_and_the_node_serves_on(etcd: Etcd) -> None:
    async with agent(etcd) as node:
        registration = await node.ready()
        for fields in BAD_FIELDS:
            request = prefill_request(GOOD, **fields)
            for call in (
                node.stub.Prefill(request),
                node.stub.Decode(decode_request(request, registration.transfer_address, **fields)),
            ):
                detail = await refusal(call)
                assert detail.status is grpc.StatusCode.INVALID_ARGUMENT, (fields, detail)
                assert detail.reason == "INVALID_REQUEST"
        for holder in ({"blocks": 2}, {"pool_address": "h:1"}, {"pool_address": "h" * 257, "blocks": 2}):
            detail = await refusal(node.stub.Prefill(prefill_request(GOOD, holders=[node_agent_pb2.Holder(**holder)])))
            assert detail.status is grpc.StatusCode.INVALID_ARGUMENT, holder
        for wait_s in (math.nan, math.inf, -1.0):
            detail = await refusal(node.stub.Prefill(prefill_request(GOOD, quoted_wait_s=wait_s)))
            assert detail.status is grpc.StatusCode.INVALID_ARGUMENT
        for fields in (
            {"source_address": ""},
            {"source_address": "a" * 257},
            {"reserve_deadline_s": -1.0},
            {"reserve_deadline_s": math.nan},
        ):
            decode = decode_request(prefill_request(GOOD), registration.transfer_address, **fields)
            assert (await refusal(node.stub.Decode(decode))).status is grpc.StatusCode.INVALID_ARGUMENT
        assert node.engine.status().iterations == 0, "no engine saw any of it"
        assert len((await node.serve(prefill_request(GOOD)))[2]) == 32


async def test_another_partition_is_refused_everywhere(etcd: Etcd) -> None:
    async with agent(etcd) as node:
        await node.ready()
        stub = node.stub
        other: dict[str, Any] = {"partition_id": "p1"}
        for call in (
            stub.Prefill(prefill_request(GOOD, **other)),
            stub.Decode(decode_request(prefill_request(GOOD), "127.0.0.1:1", **other)),
            stub.Abort(node_agent_pb2.AbortRequest(**other)),
            stub.WatchStatus(node_agent_pb2.WatchStatusRequest(**other)),
            stub.ReadDigests(node_agent_pb2.ReadDigestsRequest(**other)),
        ):
            detail = await refusal(call)
            assert (detail.status, detail.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WRONG_PARTITION")


async def test_the_same_leg_twice(etcd: Etcd) -> None:
    async with agent(etcd, mock=SLOW) as node:
        await node.ready()
        request = prefill_request(ids(1, 1000))
        running = node.stub.Prefill(request)
        await until_said(running, "queued")
        assert (await refusal(node.stub.Prefill(request))).status is grpc.StatusCode.INVALID_ARGUMENT
        running.cancel()
        await node.idle()


async def test_requote_when_the_wait_is_much_longer_than_quoted(etcd: Etcd) -> None:
    async with agent(etcd, mock={"speed_up": 0.05}, prefill_coefficients="0.1,0.001,0,0,0") as node:
        await node.ready()
        running = node.stub.Prefill(prefill_request(ids(1, 1000)))
        await until_said(running, "taken")
        asked = prefill_request(ids(2, 100), may_requote=True, quoted_wait_s=0.0)
        answers = [response async for response in node.stub.Prefill(asked)]
        assert [each.WhichOneof("event") for each in answers] == ["requote"]
        truth_s = answers[0].wait_s
        assert truth_s > 0.2
        for fields in ({"may_requote": True, "quoted_wait_s": truth_s}, {"may_requote": False, "quoted_wait_s": 0.0}):
            call = node.stub.Prefill(prefill_request(ids(3, 100), **fields))
            await until_said(call, "queued")
            call.cancel()
        running.cancel()
        await node.idle()


async def test_a_full_queue_says_when_to_come_again(etcd: Etcd) -> None:
    async with agent(etcd, mock=SLOW, max_queued_legs=1) as node:
        await node.ready()
        running = node.stub.Prefill(prefill_request(ids(1, 1000)))
        await until_said(running, "taken")
        waiting = node.stub.Prefill(prefill_request(ids(2, 100)))
        await until_said(waiting, "queued")
        detail = await refusal(node.stub.Prefill(prefill_request(ids(3, 100))))
        assert (detail.status, detail.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert detail.retry_after_s is not None
        assert detail.retry_after_s > 0
        running.cancel()
        waiting.cancel()
        await node.idle()


async def test_cancelling_a_stream_ends_its_leg(etcd: Etcd) -> None:
    async with agent(etcd, mock=SLOW) as node:
        registration = await node.ready()
        for stage in ("queued", "taken", "prefilled"):
            call = node.stub.Prefill(prefill_request(ids(1, 600)))
            await until_said(call, stage)
            call.cancel()
            await node.idle()
        request = prefill_request(ids(2, 50), sampling=sampling(max_tokens=900))
        prefilling = node.stub.Prefill(request)
        await until_said(prefilling, "taken")
        decoding = node.stub.Decode(decode_request(request, registration.transfer_address))
        await until_said(decoding, "tokens")
        decoding.cancel()
        await node.idle()
        node.engine.check_invariants()


async def test_abort_ends_a_leg_and_says_whether_there_was_one(etcd: Etcd) -> None:
    async with agent(etcd, mock=SLOW) as node:
        await node.ready()
        request = prefill_request(ids(1, 600))
        call = node.stub.Prefill(request)
        await until_said(call, "taken")
        abort = node_agent_pb2.AbortRequest(partition_id="p0", leg_id=request.leg_id)
        assert (await node.stub.Abort(abort)).found
        detail = await refusal(call)
        assert (detail.status, detail.reason) == (grpc.StatusCode.ABORTED, "ABORTED")
        assert not (await node.stub.Abort(abort)).found


async def test_losses_are_told_by_reason(etcd: Etcd) -> None:
    async with agent(etcd, mock={"decode_slots": 1}, keep_s=0.1) as node:
        registration = await node.ready()
        detail = await refusal(node.stub.Prefill(prefill_request(ids(1, 50))))
        assert (detail.status, detail.reason) == (grpc.StatusCode.UNAVAILABLE, "DECODE_LOST")
        request = decode_request(prefill_request(ids(2, 50)), "127.0.0.1:1")
        detail = await refusal(node.stub.Decode(request))
        assert (detail.status, detail.reason) == (grpc.StatusCode.UNAVAILABLE, "SOURCE_LOST")
        endless = prefill_request(ids(3, 50), sampling=sampling(max_tokens=1900))
        prefilling = node.stub.Prefill(endless)
        await until_said(prefilling, "taken")
        decoding = node.stub.Decode(decode_request(endless, registration.transfer_address))
        await until_said(decoding, "tokens")
        request = decode_request(prefill_request(ids(4, 50)), registration.transfer_address, reserve_deadline_s=0.1)
        detail = await refusal(node.stub.Decode(request))
        assert (detail.status, detail.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_ROOM")
        assert detail.retry_after_s is not None
        decoding.cancel()


async def test_digests_in_the_order_asked(etcd: Etcd) -> None:
    async with agent(etcd, "a") as a, agent(etcd, "b") as b:
        await a.ready()
        await b.ready()
        tokens = ids(1, 4 * BLOCK + 3)
        await a.serve(prefill_request(tokens), b)
        names = names_of(tokens)
        asked = [bytes(16), *reversed(names)]

        async def digests(node: Agent, tier: Any) -> bytes:
            request = node_agent_pb2.ReadDigestsRequest(partition_id="p0", tier=tier, names=b"".join(asked))
            return bytes((await node.stub.ReadDigests(request)).digests)

        wanted = await digests(a, common_pb2.TIER_L1)
        assert len(wanted) == 32 * len(asked)
        assert wanted[:32] == bytes(32)
        assert bytes(32) not in [wanted[at : at + 32] for at in range(32, len(wanted), 32)]
        for node in (a, b):
            for tier in (common_pb2.TIER_L1, common_pb2.TIER_L2):
                assert await digests(node, tier) == wanted


@pytest.mark.parametrize(
    "fields",
    [
        {"tier": common_pb2.TIER_UNSPECIFIED},
        {"tier": 9},
        {"tier": common_pb2.TIER_L1, "names": b"x"},
        {"tier": common_pb2.TIER_L1, "names": bytes(16 * 4097)},
    ],
)
async def test_bad_digest_requests(etcd: Etcd, fields: dict[str, Any]) -> None:
    async with agent(etcd) as node:
        await node.ready()
        detail = await refusal(node.stub.ReadDigests(node_agent_pb2.ReadDigestsRequest(partition_id="p0", **fields)))
        assert detail.status is grpc.StatusCode.INVALID_ARGUMENT


async def test_ten_thousand_random_byte_strings_leave_the_agent_alive(etcd: Etcd) -> None:
    methods = [
        f"/evolving.internal.v1.NodeAgentService/{name}" for name in ("Prefill", "Decode", "Abort", "ReadDigests")
    ]
    async with agent(etcd) as node:
        await node.ready()
        async with grpc.aio.insecure_channel(node.service.address) as channel:
            seen = await send_random_bytes(channel, methods, 10_000, seed=1)
        assert sum(seen.values()) == 10_000
        assert no_crash(seen), seen
        assert len((await node.serve(prefill_request(GOOD)))[2]) == 32
