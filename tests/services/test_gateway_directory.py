"""Requests whose directory is away, refuses them, or says what makes no sense."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from gateway_harness import KEYS, bench, failure
from services.test_gateway_trouble import BRANCH, PROMPT, SAMPLING, finish
from waiting import eventually

from evolving.internal.v1 import directory_pb2
from evolving.runtime.keys import ServiceRegistration, encode
from evolving.v1 import gateway_pb2
from evolving.wire.status import ErrorDetail, parse_error


@pytest.mark.parametrize("how", ["never there", "gone", "hanging", "broken"])
async def test_without_a_directory_requests_are_served_by_load(how: str) -> None:
    async with bench("n", directory=how != "never there", directory_timeout_s=0.2, finish_retry_s=0.2) as it:
        if how == "gone":
            await it.directory.stop()
        it.directory.hang = how == "hanging"
        if how == "broken":
            it.directory.refuse = ErrorDetail(grpc.StatusCode.INTERNAL, "INTERNAL", "a bug")
        await finish(it.generate(PROMPT, branch=BRANCH, sampling=SAMPLING))


async def test_an_end_that_nobody_acknowledged_is_an_error() -> None:
    async with bench("n", directory=False) as it:
        error = await failure(it.stub.EndBranches(gateway_pb2.EndBranchesRequest(branch_ids=["b"])))
        assert (error.code(), parse_error(error).reason) == (grpc.StatusCode.UNAVAILABLE, "DIRECTORY_AWAY")


@pytest.mark.parametrize("reason", ["BRANCH_ENDED", "STALE_VERSION"])
async def test_what_the_directory_refuses_reaches_the_client(reason: str) -> None:
    async with bench("n") as it:
        facts = {"current_version": "4"}
        it.directory.refuse = ErrorDetail(grpc.StatusCode.FAILED_PRECONDITION, reason, "no", facts)
        detail = parse_error(await failure(it.generate(PROMPT, branch=BRANCH, sampling=SAMPLING).all()))
        assert (detail.status, detail.reason) == (grpc.StatusCode.FAILED_PRECONDITION, reason)
        assert detail.metadata == facts
        assert it.nodes["n"].prefills == []


@pytest.mark.parametrize("reason", ["NOT_LEADER", "WRONG_PARTITION", "STALE_TERM"])
async def test_a_directory_that_is_not_in_charge_counts_as_away(reason: str) -> None:
    async with bench("n") as it:
        it.directory.refuse = ErrorDetail(grpc.StatusCode.FAILED_PRECONDITION, reason, "no")
        await finish(it.generate(PROMPT, branch=BRANCH, sampling=SAMPLING))


async def test_an_answer_that_makes_no_sense_ends_the_request() -> None:
    async with bench("n") as it:
        it.nodes["n"].script.odd_ids = True
        error = await failure(it.generate(PROMPT, branch=BRANCH, sampling=SAMPLING).all())
        assert error.code() is grpc.StatusCode.INTERNAL
        await eventually(lambda: not it.nodes["n"].running)


async def test_a_branch_that_ends_while_a_request_runs_does_not_stop_its_recovery() -> None:
    async with bench("a", "b") as it:
        await it.split(1, a="prefill", b="decode")
        it.nodes["b"].script.pause_at = 5
        stream = it.generate(PROMPT, branch=BRANCH, sampling=SAMPLING)
        await stream.until(lambda: len(stream.ids) == 5)
        it.directory.refuse = ErrorDetail(grpc.StatusCode.FAILED_PRECONDITION, "BRANCH_ENDED", "ended")
        await it.nodes["b"].die()
        await finish(stream)


async def test_of_several_directories_the_one_registered_last_is_asked() -> None:
    async with bench("n") as it:
        newer = type(it.directory)()
        await newer.start()
        record = ServiceRegistration("directory", "a", newer.address, "0", 0.0)
        await it.store.put(KEYS.service("directory", "a"), encode(record))
        async with asyncio.timeout(10):
            while not newer.begins:
                await it.generate(PROMPT, sampling=gateway_pb2.Sampling(max_tokens=1)).all()
        await newer.stop()
        assert isinstance(newer.begins[0], directory_pb2.BeginRequest)
