"""Requests that lose a node, a queue place or their client: a pause at most, never a gap or repeat."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from gateway_harness import Bench, Stream, bench, failure
from scripted_nodes import MAX_PROMPT, bytes_ids, expected_output, ids_bytes
from waiting import eventually

from evolving.internal.v1 import directory_pb2
from evolving.v1 import common_pb2, gateway_pb2
from evolving.wire.status import ErrorDetail, parse_error

PROMPT = list(range(1, 101))
LENGTH = 20
SAMPLING = gateway_pb2.Sampling(max_tokens=LENGTH)
BRANCH = common_pb2.BranchMetadata(branch_id="b")
WANT = expected_output(PROMPT, LENGTH)


async def finish(stream: Stream) -> gateway_pb2.GenerateFinished:
    """Read to the end; the output must be the one of an undisturbed request."""
    finished = await stream.all()
    assert stream.ids == WANT
    assert bytes_ids(finished.output_token_ids) == WANT
    assert finished.usage.output_tokens == LENGTH
    return finished


async def queued_at(it: Bench, node_id: str, branch: common_pb2.BranchMetadata | None = None) -> Stream:
    """A request that waits in this node's queue."""
    it.nodes[node_id].script.take.clear()
    stream = it.generate(PROMPT, sampling=SAMPLING, branch=branch)
    await stream.until(lambda: bool(stream.started))
    assert stream.started[-1].prefill_node_id == node_id
    return stream


async def test_a_decode_node_that_dies_is_replaced_and_the_stream_resumes() -> None:
    async with bench("p", "d1", "d2") as it:
        await it.split(1, p="prefill", d1="decode", d2="decode")
        it.nodes["d1"].script.pause_at = it.nodes["d2"].script.pause_at = 8
        stream = it.generate(PROMPT, branch=BRANCH, sampling=SAMPLING)
        await stream.until(lambda: len(stream.ids) == 8)
        first = next(node for node in (it.nodes["d1"], it.nodes["d2"]) if node.decodes)
        other = it.nodes["d2" if first.node_id == "d1" else "d1"]
        other.script.pause_at = None
        await first.die()
        finished = await finish(stream)
        assert finished.decode_node_id == other.node_id
        assert finished.attempts == 1
        resumed = it.nodes["p"].prefills[1]
        assert resumed.generated_tokens == 8
        assert bytes_ids(resumed.token_ids) == [*PROMPT, *WANT[:8]]
        assert resumed.sampling.max_tokens == LENGTH
        assert it.directory.begins[1].rematch
        assert [started.prefill_node_id for started in stream.started] == ["p", "p"]


async def test_reuse_is_that_of_the_last_routing_within_the_prompt() -> None:
    async with bench("p", "d1", "d2") as it:
        await it.split(1, p="prefill", d1="decode", d2="decode")
        it.nodes["d1"].script.pause_at = it.nodes["d2"].script.pause_at = 18
        stream = it.generate(PROMPT, branch=BRANCH, sampling=SAMPLING)
        await stream.until(lambda: len(stream.ids) == 18)
        first = next(node for node in (it.nodes["d1"], it.nodes["d2"]) if node.decodes)
        it.nodes["d2" if first.node_id == "d1" else "d1"].script.pause_at = None
        it.directory.loss = common_pb2.LOSS_CAUSE_NODE
        it.directory.match = directory_pb2.Match(  # P has all seven blocks of prompt and output
            pool_blocks=7, nodes=[directory_pb2.NodeMatch(node_id="p", l2_blocks=7, any_blocks=7)]
        )
        await first.die()
        finished = await finish(stream)
        assert finished.reuse == gateway_pb2.Reuse(
            pool_tokens=len(PROMPT), planned_tokens=len(PROMPT), loss=common_pb2.LOSS_CAUSE_NODE
        )


async def test_a_decode_node_that_dies_after_its_last_token_costs_nothing() -> None:
    async with bench("p", "d") as it:
        await it.split(1, p="prefill", d="decode")
        it.nodes["d"].script.pause_at = LENGTH
        stream = it.generate(PROMPT, sampling=SAMPLING)
        await stream.until(lambda: len(stream.ids) == LENGTH)
        await it.nodes["d"].die()
        finished = await finish(stream)
        assert finished.reason == gateway_pb2.FINISH_REASON_LENGTH
        assert len(it.nodes["p"].prefills) == 1


async def test_a_prefill_node_that_dies_with_a_queued_request_is_replaced() -> None:
    async with bench("a", "b") as it:
        await it.wait("b", 2.0)
        stream = await queued_at(it, "a")
        await it.nodes["a"].die()
        finished = await finish(stream)
        assert finished.prefill_node_id == "b"


async def test_the_last_node_of_a_phase_is_replaced_by_one_of_the_other() -> None:
    async with bench("p", "d") as it:
        await it.split(1, p="prefill", d="decode")
        it.nodes["d"].script.pause_at = 5
        stream = it.generate(PROMPT, sampling=SAMPLING)
        await stream.until(lambda: len(stream.ids) == 5)
        await it.nodes["d"].die()
        finished = await finish(stream)
        assert (finished.prefill_node_id, finished.decode_node_id) == ("p", "p")


async def test_a_request_waits_for_its_only_node_to_come_back() -> None:
    async with bench("n") as it:
        it.nodes["n"].script.pause_at = 5
        stream = it.generate(PROMPT, sampling=SAMPLING)
        await stream.until(lambda: len(stream.ids) == 5)
        await it.nodes["n"].die()
        again = type(it.nodes["n"])("n")
        again.status.incarnation = "n-2"
        it.nodes["n"] = again
        await again.start()
        await it.register(again)
        await finish(stream)


async def test_a_request_that_finds_no_node_any_more_fails_in_the_end() -> None:
    async with bench("n", recover_s=0.3) as it:
        it.nodes["n"].script.pause_at = 5
        stream = it.generate(PROMPT, branch=BRANCH, sampling=SAMPLING)
        await stream.until(lambda: len(stream.ids) == 5)
        await it.nodes["n"].die()
        error = await failure(stream.all())
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert stream.ids == WANT[:5]
        await eventually(lambda: len(it.directory.finished) == 1)


async def test_an_output_too_long_to_compute_anew_says_so() -> None:
    prompt = [1] * (MAX_PROMPT - 3)
    async with bench("n", "m") as it:
        for node in it.nodes.values():
            node.script.pause_at = 6
        stream = it.generate(prompt, sampling=SAMPLING)
        await stream.until(lambda: len(stream.ids) == 6)
        await next(node for node in it.nodes.values() if node.decodes).die()
        detail = parse_error(await failure(stream.all()))
        assert (detail.status, detail.reason) == (grpc.StatusCode.UNAVAILABLE, "TOO_LONG_TO_MOVE")


async def test_a_node_that_leaves_a_position_out_is_not_believed() -> None:
    async with bench("p", "d1", "d2") as it:
        await it.split(1, p="prefill", d1="decode", d2="decode")
        it.nodes["d1"].script.skip_at = it.nodes["d2"].script.skip_at = 6
        assert (await finish(it.generate(PROMPT, sampling=SAMPLING))).attempts == 1


async def test_a_requoted_request_goes_where_the_wait_is_shorter_and_at_most_twice_back() -> None:
    async with bench("a", "b") as it:
        await it.wait("b", 1.0)
        it.nodes["a"].script.requotes = 1
        finished = await finish(it.generate(PROMPT, sampling=SAMPLING))
        assert finished.prefill_node_id == "b"
        assert finished.attempts == 0
        assert it.metric("gateway_requotes_total") == 1


async def test_the_third_quote_is_final() -> None:
    async with bench("n") as it:
        it.nodes["n"].script.requotes = 9
        await finish(it.generate(PROMPT, sampling=SAMPLING))
        assert [leg.may_requote for leg in it.nodes["n"].prefills] == [True, True, False]
        assert it.nodes["n"].prefills[2].quoted_wait_s == pytest.approx(5.0)


async def test_a_queued_request_leaves_a_node_that_no_longer_prefills() -> None:
    async with bench("a", "b") as it:
        await it.split(1, a="prefill", b="decode")
        stream = await queued_at(it, "a")
        await it.split(2, a="decode", b="prefill")
        finished = await finish(stream)
        assert (finished.prefill_node_id, finished.decode_node_id) == ("b", "a")
        assert finished.attempts == 0
        assert len(it.nodes["a"].cut_off) == 1
        assert [started.prefill_node_id for started in stream.started] == ["a", "b"]


async def test_a_running_request_stays_where_it_is_when_roles_switch() -> None:
    async with bench("a", "b") as it:
        await it.split(1, a="prefill", b="decode")
        it.nodes["b"].script.pause_at = 5
        stream = it.generate(PROMPT, sampling=SAMPLING)
        await stream.until(lambda: len(stream.ids) == 5)
        await it.split(2, a="decode", b="prefill")
        it.nodes["b"].script.resume.set()
        await finish(stream)
        assert len(it.nodes["b"].decodes) == 1
        assert it.nodes["a"].cut_off == it.nodes["b"].cut_off == []


async def test_a_newer_epoch_told_by_a_node_is_looked_up() -> None:
    async with bench("a", "b") as it:
        await it.split(1, a="prefill", b="decode")
        it.store.set_available(False)
        it.nodes["a"].push(epoch=5, role=common_pb2.ROLE_DECODE)
        it.nodes["b"].push(epoch=5, role=common_pb2.ROLE_PREFILL)
        stream = it.generate(PROMPT, sampling=gateway_pb2.Sampling(max_tokens=1))
        await stream.all()
        async with asyncio.timeout(10):
            while stream.started[0].prefill_node_id != "b":
                stream = it.generate(PROMPT, sampling=gateway_pb2.Sampling(max_tokens=1))
                await stream.all()
        assert it.nodes["b"].prefills[-1].epoch == 5


@pytest.mark.parametrize("stage", ["queued", "decoding"])
async def test_a_client_that_goes_away_frees_both_legs_and_the_branch(stage: str) -> None:
    async with bench("n") as it:
        if stage == "queued":
            stream = await queued_at(it, "n", branch=BRANCH)
        else:
            it.nodes["n"].script.pause_at = 5
            stream = it.generate(PROMPT, branch=BRANCH, sampling=SAMPLING)
            await stream.until(lambda: len(stream.ids) == 5)
        stream.call.cancel()
        await eventually(lambda: not it.nodes["n"].running)
        assert len(it.nodes["n"].cut_off) == 1
        await eventually(lambda: len(it.directory.finished) == 1)
        await eventually(lambda: it.metric("gateway_requests_total", outcome="cancelled") == 1)


async def test_a_deadline_ends_the_work_too() -> None:
    async with bench("n") as it:
        it.nodes["n"].script.pause_at = 5
        stream = it.generate(PROMPT, branch=BRANCH, sampling=SAMPLING, timeout=0.5)
        error = await failure(stream.all())
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: not it.nodes["n"].running)
        await eventually(lambda: len(it.directory.finished) == 1)


async def test_a_request_without_a_deadline_gets_the_gateway_s() -> None:
    async with bench("n", request_deadline_s=0.3) as it:
        it.nodes["n"].script.pause_at = 5
        error = await failure(it.generate(PROMPT, sampling=SAMPLING, timeout=None).all())
        assert parse_error(error).reason == "DEADLINE_EXCEEDED"


async def test_a_node_that_falls_silent_gets_no_new_work_until_it_speaks() -> None:
    async with bench("n", node_silence_s=2.0) as it:
        it.nodes["n"].script.silent = True
        await eventually(lambda: not it.service.ready.ready)
        error = await failure(it.generate(PROMPT, sampling=SAMPLING).all())
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        it.nodes["n"].script.silent = False
        await eventually(lambda: it.service.ready.ready)
        await finish(it.generate(PROMPT, sampling=SAMPLING))


async def test_a_second_call_with_the_same_id_takes_over() -> None:
    async with bench("n") as it:
        it.nodes["n"].script.pause_at = 5
        first = it.generate(PROMPT, request_id="r", branch=BRANCH, sampling=SAMPLING)
        await first.until(lambda: len(first.ids) == 5)
        second = it.generate(
            PROMPT,
            request_id="r",
            branch=BRANCH,
            sampling=SAMPLING,
            resume_from=3,
            resume_token_ids=ids_bytes(WANT[:3]),
        )
        error = await failure(first.all())
        assert (error.code(), parse_error(error).reason) == (grpc.StatusCode.ABORTED, "SUPERSEDED")
        it.nodes["n"].script.resume.set()
        finished = await second.all()
        assert second.first_index == 3
        assert second.ids == WANT[3:]
        assert bytes_ids(finished.output_token_ids) == WANT
        assert it.nodes["n"].prefills[1].generated_tokens == 3
        await eventually(lambda: len(it.directory.finished) == 1)


async def test_the_same_id_with_another_body_is_a_conflict() -> None:
    async with bench("n") as it:
        await it.generate(PROMPT, request_id="r", sampling=SAMPLING).all()
        error = await failure(it.generate([*PROMPT, 5], request_id="r", sampling=SAMPLING).all())
        assert (error.code(), parse_error(error).reason) == (grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_CONFLICT")
        await it.generate(PROMPT, request_id="r", sampling=SAMPLING).all()


async def test_resuming_a_complete_output_only_finishes_it() -> None:
    async with bench("n") as it:
        stream = it.generate(PROMPT, sampling=SAMPLING, resume_from=LENGTH, resume_token_ids=ids_bytes(WANT))
        finished = await stream.all()
        assert stream.ids == []
        assert finished.reason == gateway_pb2.FINISH_REASON_LENGTH
        stopped = it.generate(
            PROMPT,
            sampling=gateway_pb2.Sampling(stop_token_ids=[WANT[4]]),
            resume_from=5,
            resume_token_ids=ids_bytes(WANT[:5]),
        )
        assert (await stopped.all()).reason == gateway_pb2.FINISH_REASON_STOP
        assert it.nodes["n"].prefills == []


async def test_full_queues_are_told_with_a_time_to_come_again() -> None:
    full = ErrorDetail(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "full", retry_after_s=7.0)
    async with bench("a", "b") as it:
        it.nodes["a"].script.refuse_prefill = full
        stream = it.generate(PROMPT, sampling=SAMPLING)
        assert (await finish(stream)).prefill_node_id == "b"
        it.nodes["b"].script.refuse_prefill = full
        detail = parse_error(await failure(it.generate(PROMPT, sampling=SAMPLING).all()))
        assert (detail.status, detail.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert detail.retry_after_s == 7.0


async def test_a_wait_too_long_is_refused() -> None:
    async with bench("n", max_wait_s=2.0) as it:
        await it.wait("n", 5.0)
        detail = parse_error(await failure(it.generate(PROMPT, sampling=SAMPLING).all()))
        assert detail.status is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert detail.retry_after_s == pytest.approx(3.0)


async def test_requests_beyond_the_limit_are_refused() -> None:
    async with bench("n", max_requests=1) as it:
        await queued_at(it, "n")
        detail = parse_error(await failure(it.generate(PROMPT, sampling=SAMPLING).all()))
        assert detail.status is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert detail.retry_after_s is not None


async def test_a_decode_node_without_room_is_passed_over() -> None:
    async with bench("p", "d1", "d2") as it:
        await it.split(1, p="prefill", d1="decode", d2="decode")
        it.nodes["d1"].push(decode_slots_free=99)
        it.nodes["d1"].script.refuse_decode = ErrorDetail(grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_ROOM", "no room")
        assert (await finish(it.generate(PROMPT, sampling=SAMPLING))).decode_node_id == "d2"


async def test_what_an_engine_refuses_as_such_is_not_tried_elsewhere() -> None:
    async with bench("a", "b") as it:
        for node in it.nodes.values():
            node.script.refuse_prefill = ErrorDetail(grpc.StatusCode.INVALID_ARGUMENT, "REJECTED", "too long")
        error = await failure(it.generate(PROMPT, sampling=SAMPLING).all())
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert sum(len(node.prefills) for node in it.nodes.values()) == 1
