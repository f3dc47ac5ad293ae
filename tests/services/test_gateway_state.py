"""The gateway's own state: request ids, contexts, recovery, settings."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evolving.core.blocks import hash_tokens
from evolving.core.contexts import Contexts
from evolving.runtime.errors import InvalidRequest
from evolving.v1 import gateway_pb2
from evolving_gateway.errors import NoNode, QueueFull, RequestConflict
from evolving_gateway.known import KnownRequests
from evolving_gateway.leg_events import LegFailed
from evolving_gateway.recovery import Recovery
from evolving_gateway.router import ModelFacts
from evolving_gateway.settings import GatewaySettings
from evolving_gateway.validation import body_digest, fill_sampling

KEY = ("tenant", "r")
ROOT = bytes(32)


def nothing() -> None:
    """An interrupt nobody waits for."""


async def test_ids_are_forgotten_by_count_and_by_age() -> None:
    known = KnownRequests(max_ids=2, max_age_s=10)
    for number in range(3):
        known.release(await known.claim(("t", str(number)), b"a", nothing, number), number)
    assert len(known) == 2
    await known.claim(("t", "0"), b"b", nothing, 3)  # the oldest: forgotten, so no conflict
    with pytest.raises(RequestConflict):
        await known.claim(("t", "2"), b"b", nothing, 12)
    await known.claim(("t", "2"), b"b", nothing, 12.1)


async def test_tenants_do_not_share_ids() -> None:
    known = KnownRequests(10, 10)
    await known.claim(("t", "r"), b"a", nothing, 0)
    await known.claim(("u", "r"), b"b", nothing, 0)


async def test_a_running_id_is_not_forgotten_and_conflicts() -> None:
    known = KnownRequests(max_ids=1, max_age_s=1)
    await known.claim(KEY, b"a", nothing, 0)
    known.release(await known.claim(("t", "other"), b"a", nothing, 0), 0)
    with pytest.raises(RequestConflict):
        await known.claim(KEY, b"b", nothing, 99)


async def test_a_takeover_waits_until_the_earlier_call_has_let_go() -> None:
    known = KnownRequests(10, 10)
    order: list[str] = []

    async def second() -> None:
        await known.claim(KEY, b"a", nothing, 1)
        order.append("second has it")

    first = await known.claim(KEY, b"a", lambda: order.append("first is told"), 0)
    task = asyncio.create_task(second())
    while not order:
        await asyncio.sleep(0)
    assert first.superseded
    order.append("first lets go")
    known.release(first, 2)
    await task
    assert order == ["first is told", "first lets go", "second has it"]


async def test_of_three_calls_the_last_one_stays() -> None:
    known = KnownRequests(10, 10)
    claims = [await known.claim(KEY, b"a", nothing, 0)]

    async def call() -> None:
        claim = await known.claim(KEY, b"a", nothing, 0)
        claims.append(claim)
        while not claim.superseded and len(claims) < 3:
            await asyncio.sleep(0)
        if claim.superseded:
            known.release(claim, 0)

    tasks = [asyncio.create_task(call()) for _ in range(2)]
    await asyncio.sleep(0)
    known.release(claims[0], 0)
    await asyncio.gather(*tasks)
    assert [claim.superseded for claim in claims] == [True, True, False]


def test_the_body_is_all_but_the_id_and_where_to_resume() -> None:
    body = gateway_pb2.GenerateRequest(request_id="a", text="x")
    again = gateway_pb2.GenerateRequest(request_id="b", text="x", resume_from=1, resume_token_ids=b"1234")
    other = gateway_pb2.GenerateRequest(request_id="a", text="y")
    assert body_digest(body) == body_digest(again) != body_digest(other)
    assert again.resume_from == 1


@given(sizes=st.lists(st.integers(0, 400), max_size=30))
def test_contexts_stay_within_their_memory_and_the_newest_stay(sizes: list[int]) -> None:
    contexts = Contexts(max_bytes=5_000)
    for number, size in enumerate(sizes):
        contexts.keep("t", f"b{number}", hash_tokens(ROOT, bytes(4 * size), 16))
        assert contexts.size_bytes <= 5_000
    if sizes:
        assert contexts.get("t", f"b{len(sizes) - 1}") is not None
    for number in range(len(sizes)):
        contexts.forget("t", f"b{number}")
    assert (len(contexts), contexts.size_bytes) == (0, 0)


def test_the_context_used_last_outlives_the_one_kept_last() -> None:
    one = hash_tokens(ROOT, bytes(1600), 16)
    contexts = Contexts(max_bytes=6_000)
    contexts.keep("t", "a", one)
    contexts.keep("t", "b", one)
    contexts.get("t", "a")
    contexts.keep("t", "c", one)
    assert [contexts.get("t", name) is not None for name in "abc"] == [True, False, True]


def failed(node: str = "n", reason: str = "DOWN", status: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> LegFailed:
    return LegFailed(node, status, reason, "it broke", 3.0)


def test_who_failed_is_avoided_until_nobody_is_left() -> None:
    recovery = Recovery(attempts_max=5, recover_s=60)
    recovery.failed(failed("a"), 1)
    recovery.failed(failed("b", "NO_ROOM", grpc.StatusCode.RESOURCE_EXHAUSTED), 1)
    recovery.failed(failed("c", "QUEUE_FULL", grpc.StatusCode.RESOURCE_EXHAUSTED), 1)
    assert set(recovery.avoid_prefill) == {"a", "c"}
    assert set(recovery.avoid_decode) == {"a", "b"}
    recovery.admitted = True
    recovery.nowhere(1)
    assert recovery.avoid_prefill == recovery.avoid_decode == {}


def test_waits_grow_and_a_token_makes_them_short_again() -> None:
    recovery = Recovery(attempts_max=100, recover_s=60)
    waits = [recovery.failed(failed(), 1) for _ in range(8)]
    assert max(waits) <= 2.0
    assert waits[-1] > waits[0]
    recovery.progressed()
    assert recovery.failed(failed(), 2) <= 0.1
    assert recovery.moves == 9


def test_giving_up_by_count_by_time_and_for_nothing_there() -> None:
    with pytest.raises(NoNode):
        Recovery(attempts_max=1, recover_s=60).failed(failed(), 1)
    with pytest.raises(NoNode):
        Recovery(attempts_max=9, recover_s=60).nowhere(0)
    recovery = Recovery(attempts_max=9, recover_s=60)
    recovery.failed(failed(), 100)
    recovery.failed(failed(), 160)
    recovery.queued()
    recovery.failed(failed(), 200)
    with pytest.raises(NoNode):
        recovery.failed(failed(), 261)


def test_full_queues_are_the_client_s_to_wait_for_unless_it_had_a_place() -> None:
    full = failed("a", "QUEUE_FULL", grpc.StatusCode.RESOURCE_EXHAUSTED)
    recovery = Recovery(attempts_max=2, recover_s=60)
    recovery.failed(full, 1)
    with pytest.raises(QueueFull) as raised:
        recovery.nowhere(1)
    assert raised.value.retry_after_s == 3.0
    recovery = Recovery(attempts_max=2, recover_s=60)
    recovery.queued()
    waits = []
    for now_s in range(1, 2000, 100):
        assert recovery.failed(full, now_s) == 0.0
        assert set(recovery.avoid_prefill) == {"a"}
        waits.append(recovery.nowhere(now_s))
    assert 0 < waits[0] < max(waits) <= 2.0
    assert (recovery.failures, recovery.moves) == (0, 0)


def test_a_full_queue_of_long_ago_makes_nobody_wait_for_nodes_that_are_gone() -> None:
    full = failed("a", "QUEUE_FULL", grpc.StatusCode.RESOURCE_EXHAUSTED)
    for queued_again in (False, True):
        recovery = Recovery(attempts_max=9, recover_s=60)
        recovery.queued()
        recovery.failed(full, 1)
        if queued_again:
            recovery.queued()
        recovery.nowhere(1)
        recovery.nowhere(2)
        with pytest.raises(NoNode if queued_again else QueueFull):
            recovery.nowhere(63)


def test_a_rejection_is_final() -> None:
    with pytest.raises(InvalidRequest, match="it broke"):
        Recovery(attempts_max=9, recover_s=60).failed(failed("a", "REJECTED", grpc.StatusCode.INVALID_ARGUMENT), 1)


def test_end_tokens_are_stop_tokens_unless_ignored() -> None:
    facts = ModelFacts("m", "f", 16, 1000, 500, 600)
    plain = fill_sampling(gateway_pb2.Sampling(stop=["x"], stop_token_ids=[7]), 100, facts, frozenset({2, 7}))
    assert list(plain.stop_token_ids) == [7, 2]
    assert list(plain.stop) == []
    assert plain.max_tokens == 500
    ignoring = fill_sampling(gateway_pb2.Sampling(ignore_eos=True, max_tokens=5), 100, facts, frozenset({2}))
    assert list(ignoring.stop_token_ids) == []
    assert ignoring.max_tokens == 5


def test_settings_make_a_routing_config() -> None:
    config = GatewaySettings(fetch_bytes_per_s=5e8, tie_share=0.1).routing()
    assert (config.fetch_bytes_per_s, config.tie_share) == (5e8, 0.1)
