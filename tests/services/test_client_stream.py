"""What a caller of evolving_client sees of one generation: its events, through broken connections and overload."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import grpc
import pytest
from scripted_gateway import GONE, Play, ScriptedGateway, output_ids, pack, refusal, serve, text_of

from evolving.v1 import gateway_pb2
from evolving_client import (
    Client,
    DeadlineExceeded,
    Event,
    EvolvingError,
    Finished,
    FinishReason,
    InvalidRequest,
    LossCause,
    Overloaded,
    ProtocolError,
    RetryPolicy,
    Reuse,
    Started,
    Tokens,
    Unavailable,
)
from evolving_client.gateways import Gateways
from evolving_client.retry import Retries

QUICK = RetryPolicy(max_failures=4, initial_backoff_s=0.001, max_backoff_s=0.002, max_overload_wait_s=1.0)
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def gateway() -> ScriptedGateway:
    """A scripted gateway; `address` is where it listens."""
    return ScriptedGateway()


@pytest.fixture
async def address(gateway: ScriptedGateway) -> AsyncIterator[str]:
    server, address = await serve(gateway)
    yield address
    await server.stop(None)


@pytest.fixture
async def client(address: str) -> AsyncIterator[Client]:
    async with Client(address, retry=QUICK) as client:
        yield client


def tokens_of(events: list[Event]) -> list[int]:
    """All ids streamed, after checking that their indices are 0, 1, 2, …"""
    ids: list[int] = []
    for event in events:
        if isinstance(event, Tokens):
            assert event.index == len(ids)
            ids.extend(event.token_ids)
    return ids


async def test_a_stream_is_started_then_tokens_then_finished(client: Client) -> None:
    events = [event async for event in client.generate(messages=CHAT, max_tokens=3)]
    assert [type(event) for event in events] == [Started, Tokens, Tokens, Tokens, Finished]
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert tokens_of(events) == list(finished.output_token_ids) == output_ids(3)
    assert finished.text == text_of(output_ids(3))
    assert finished.reason is FinishReason.LENGTH
    assert (finished.cached.own_l1, finished.cached.own_l2, finished.cached.peer_l2) == (1, 2, 0)
    assert finished.cached.total == finished.usage.cached_tokens
    assert finished.usage.prompt_tokens == finished.usage.cached_tokens + finished.usage.computed_tokens
    assert (finished.timings.queue_s, finished.timings.tpot_s) == (0.1, 0.6)
    assert (finished.timings.fetch_s, finished.timings.fetch_hidden_s) == (0.2, 0.15)
    assert finished.reuse == Reuse(pool_tokens=4, planned_tokens=3, loss=LossCause.NODE)
    assert (finished.prefill_node_id, finished.decode_node_id) == ("node-a", "node-b")
    assert finished.reconnects == 0


async def test_a_prompt_is_text_or_messages_or_token_ids(client: Client, gateway: ScriptedGateway) -> None:
    await client.generate(text="once").finish()
    await client.generate(messages=CHAT).finish()
    await client.generate(token_ids=[1, 2, 70000]).finish()
    text, chat, ids = gateway.requests
    assert text.text == "once"
    assert [(message.role, message.content) for message in chat.chat.messages] == [("user", "hi")]
    assert ids.token_ids == pack([1, 2, 70000])


@pytest.mark.parametrize(
    "prompt",
    [
        {},
        {"text": "a", "token_ids": [1]},
        {"token_ids": [-1]},
        {"token_ids": [2**32]},
        {"token_ids": ["1"]},
        {"messages": ["hi"]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": "x", "name": "y"}]},
        {"messages": [{"role": "assistant", "content": "x", "token_ids": None}]},
        {"messages": [{"role": "assistant", "content": "x", "token_ids": "12"}]},
        {"text": "a", "max_tokens": -1},
        {"text": "a", "max_tokens": "many"},
        {"text": "a", "stop": "\n"},
        {"text": "a", "temprature": 1.0},
    ],
)
async def test_a_request_that_makes_no_sense_is_refused_before_it_is_sent(
    client: Client, gateway: ScriptedGateway, prompt: dict[str, object]
) -> None:
    with pytest.raises(InvalidRequest):
        client.generate(**prompt)  # type: ignore[arg-type]
    assert not gateway.requests


async def test_options_travel_in_the_request(client: Client, gateway: ScriptedGateway) -> None:
    await client.generate(
        text="x", max_tokens=2, temperature=0.5, top_k=7, stop=["a", "b"], stop_token_ids=[9], seed=0,
        ignore_eos=True, priority=-3, model="m", request_id="mine",
    ).finish()  # fmt: skip
    (request,) = gateway.requests
    expected = gateway_pb2.Sampling(
        max_tokens=2, temperature=0.5, top_k=7, stop=["a", "b"], stop_token_ids=[9], seed=0, ignore_eos=True
    )
    assert request.sampling == expected
    assert (request.priority, request.model, request.request_id) == (-3, "m", "mine")


async def test_each_request_has_its_own_id(client: Client, gateway: ScriptedGateway) -> None:
    for _ in range(3):
        await client.generate(text="x").finish()
    assert len({request.request_id for request in gateway.requests} - {""}) == 3


async def test_the_token_is_sent_as_a_bearer(gateway: ScriptedGateway, address: str) -> None:
    async with Client(address, token="secret") as client:
        await client.generate(text="x").finish()
        await client.end(["b"])
    assert gateway.tokens_seen == ["Bearer secret"] * 2


@pytest.mark.parametrize("break_at", [0, 1, 5, 7, 8])
@pytest.mark.parametrize("per_message", [1, 3])
async def test_a_broken_stream_goes_on_after_the_last_token(
    client: Client, gateway: ScriptedGateway, break_at: int, per_message: int
) -> None:
    gateway.plays.extend([Play(fail_at=break_at, per_message=per_message), Play(per_message=2)])
    events = [event async for event in client.generate(text="x", max_tokens=8)]
    assert tokens_of(events) == output_ids(8)
    first, second = gateway.requests
    received = output_ids(8)[: second.resume_from]
    assert second.resume_token_ids == pack(received)
    assert abs(second.resume_from - break_at) < per_message
    second.ClearField("resume_from")
    second.ClearField("resume_token_ids")
    assert second == first, "a resumed request has the same id and body"
    assert isinstance(events[-1], Finished)
    assert events[-1].reconnects == 1


async def test_text_held_back_to_the_end_comes_once(client: Client, gateway: ScriptedGateway) -> None:
    gateway.plays.extend([Play(held_text="end", fail_at=8), Play(held_text="end")])
    events = [event async for event in client.generate(text="x", max_tokens=8)]
    assert "".join(event.text for event in events if isinstance(event, Tokens)) == text_of(output_ids(8)) + "end"
    assert tokens_of(events) == output_ids(8)


async def test_when_a_gateway_dies_the_next_address_goes_on(gateway: ScriptedGateway) -> None:
    other = ScriptedGateway()
    server, address = await serve(gateway)
    other_server, other_address = await serve(other)
    gateway.plays.append(Play(hang_at=4))
    ids: list[int] = []
    async with Client(address, other_address, retry=QUICK) as client:
        async for event in client.generate(text="x", max_tokens=9):
            if isinstance(event, Tokens):
                ids.extend(event.token_ids)
            if len(ids) == 4 and not other.requests:
                await server.stop(None)
        assert ids == output_ids(9)
        assert other.requests[0].resume_from == 4
        await client.generate(text="y").finish()
        assert len(other.requests) == 2, "the address that works is kept"
    await other_server.stop(None)


async def test_an_address_where_nobody_listens_is_passed_over(address: str) -> None:
    server, gone = await serve(ScriptedGateway())
    await server.stop(None)
    async with Client(gone, address, retry=QUICK) as client:
        assert (await client.generate(text="x", max_tokens=2).finish()).reconnects == 1
        assert await client.end(["b"]) == ("b",)


async def test_calls_that_fail_together_leave_an_address_once() -> None:
    gateways = Gateways(["a:1", "b:1", "c:1"], None, None)
    gateways.leave("a:1")
    gateways.leave("a:1")
    assert gateways.address == "b:1"
    gateways.leave("b:1")
    gateways.leave("c:1")
    assert gateways.address == "a:1"


async def test_failures_without_progress_are_bounded(client: Client, gateway: ScriptedGateway) -> None:
    gateway.plays.extend([Play(fail_at=0)] * 20)
    with pytest.raises(Unavailable):
        await client.generate(text="x").finish()
    assert len(gateway.requests) == QUICK.max_failures


async def test_a_start_without_tokens_is_no_progress(client: Client, gateway: ScriptedGateway) -> None:
    gateway.plays.append(Play(fail_at=2))
    gateway.plays.extend([Play(fail_at=1)] * 20)  # says `started`, then breaks before the token that is due
    with pytest.raises(Unavailable):
        await client.generate(text="x").finish()
    assert len(gateway.requests) == QUICK.max_failures


async def test_each_new_token_gives_all_retries_back(client: Client, gateway: ScriptedGateway) -> None:
    total = 3 * QUICK.max_failures
    gateway.plays.extend(Play(fail_at=index) for index in range(1, total))
    finished = await client.generate(text="x", max_tokens=total).finish()
    assert list(finished.output_token_ids) == output_ids(total)
    assert finished.reconnects == total - 1


@pytest.mark.parametrize(
    "play",
    [
        pytest.param(Play(shift=1), id="an index left out"),
        pytest.param(Play(tail=(7,)), id="a result of other tokens"),
        pytest.param(Play(silent_end=True), id="no result"),
        pytest.param(Play(finish_reason=0), id="no reason"),
    ],
)
async def test_a_broken_contract_is_an_error_not_a_retry(client: Client, gateway: ScriptedGateway, play: Play) -> None:
    gateway.plays.append(play)
    with pytest.raises(ProtocolError):
        await client.generate(text="x").finish()
    assert len(gateway.requests) == 1


async def test_a_token_sent_twice_after_a_resume_is_an_error(client: Client, gateway: ScriptedGateway) -> None:
    gateway.plays.extend([Play(fail_at=3), Play(shift=-1)])
    generation = client.generate(text="x")
    with pytest.raises(ProtocolError, match="token 3 was due"):
        await generation.finish()
    assert generation.received_token_ids == tuple(output_ids(3))


async def test_an_overloaded_gateway_is_asked_again(client: Client, gateway: ScriptedGateway) -> None:
    busy = refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", retry_after_s=0.001)
    gateway.plays.extend([Play(fail_at=0, error=busy)] * 6 + [Play(fail_at=2, error=busy)])
    finished = await client.generate(text="x").finish()
    assert list(finished.output_token_ids) == output_ids(8)
    assert len({request.request_id for request in gateway.requests}) == 1


async def test_overload_without_a_time_to_come_again_is_final(client: Client, gateway: ScriptedGateway) -> None:
    gateway.plays.append(Play(fail_at=0, error=refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")))
    with pytest.raises(Overloaded) as caught:
        await client.generate(text="x").finish()
    assert caught.value.retry_after_s is None
    assert len(gateway.requests) == 1


async def test_the_time_for_a_request_ends_it(client: Client, gateway: ScriptedGateway) -> None:
    gateway.plays.append(Play(hang_at=2))
    with pytest.raises(DeadlineExceeded):
        await client.generate(text="x", timeout_s=0.3).finish()
    assert len(gateway.requests) == 1
    await asyncio.wait_for(gateway.cancelled.wait(), 10)


@pytest.mark.parametrize("how", ["break", "aclose", "with", "task"])
async def test_leaving_a_generation_stops_the_work(client: Client, gateway: ScriptedGateway, how: str) -> None:
    gateway.plays.append(Play(hang_at=2))
    if how == "break":
        async for event in client.generate(text="x"):
            if isinstance(event, Tokens):
                break
        gc.collect()
    elif how == "aclose":
        generation = client.generate(text="x")
        assert isinstance(await anext(generation), Started)
        await generation.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(generation)
    elif how == "with":
        async with client.generate(text="x") as generation:
            await anext(generation)
    else:
        reading = asyncio.Event()

        async def read() -> None:
            async for _ in client.generate(text="x"):
                reading.set()

        task = asyncio.create_task(read())
        await reading.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await asyncio.wait_for(gateway.cancelled.wait(), 10)
    assert len(gateway.requests) == 1


async def test_many_generations_share_a_client(client: Client) -> None:
    generations = [client.generate(text="x", max_tokens=5 + index) for index in range(30)]
    results = await asyncio.gather(*(generation.finish() for generation in generations))
    assert [len(result.output_token_ids) for result in results] == [5 + index for index in range(30)]


async def test_unary_calls_are_retried_too(client: Client, gateway: ScriptedGateway) -> None:
    gateway.unary_errors.extend([GONE, GONE])
    (model,) = await client.models()
    assert model.block_tokens == 64


async def test_a_closed_client_says_so(address: str) -> None:
    client = Client(address)
    await client.close()
    with pytest.raises(EvolvingError, match="closed"):
        await client.models()


def test_a_client_needs_an_address() -> None:
    with pytest.raises(ValueError, match="address"):
        Client()


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.sleeps_s: list[float] = []

    def clock(self) -> float:
        """Seconds."""
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        """Move the clock."""
        self.sleeps_s.append(seconds)
        self.now_s += seconds


async def run_failing(retries: Retries, error: EvolvingError) -> int:
    """Attempts made of something that always fails with `error`."""
    attempts = 0

    async def attempt() -> None:
        nonlocal attempts
        attempts += 1
        retries.note_failure(error)
        raise error

    with pytest.raises(type(error)):
        await retries.run(attempt)
    return attempts


async def test_waits_double_up_to_the_longest_and_are_spread() -> None:
    time = Time()
    policy = RetryPolicy(max_failures=8, initial_backoff_s=1.0, max_backoff_s=10.0)
    attempts = await run_failing(Retries(policy, None, clock=time.clock, sleep=time.sleep), Unavailable("gone"))
    assert attempts == policy.max_failures
    assert len(time.sleeps_s) == attempts - 1
    for slept_s, full_s in zip(time.sleeps_s, [1, 2, 4, 8, 10, 10, 10], strict=True):
        assert full_s / 2 <= slept_s <= full_s


async def test_overload_is_waited_out_as_told_up_to_the_limit() -> None:
    time = Time()
    policy = RetryPolicy(max_overload_wait_s=10.0)
    error = Overloaded("busy", retry_after_s=3.0)
    attempts = await run_failing(Retries(policy, None, clock=time.clock, sleep=time.sleep), error)
    assert time.sleeps_s == [3.0, 3.0, 3.0], "a fourth wait would exceed 10 s"
    assert attempts == 4


async def test_no_retry_is_begun_that_could_not_end_in_time() -> None:
    time = Time()
    retries = Retries(RetryPolicy(), 5.0, clock=time.clock, sleep=time.sleep)
    error = Overloaded("busy", retry_after_s=3.0)

    async def attempt() -> None:
        raise error

    with pytest.raises(DeadlineExceeded) as caught:
        await retries.run(attempt)
    assert caught.value.__cause__ is error
    assert time.sleeps_s == [3.0]


@pytest.mark.parametrize(
    "limits",
    [{"max_failures": 0}, {"initial_backoff_s": -1}, {"initial_backoff_s": 9, "max_backoff_s": 1},
     {"max_overload_wait_s": -1}],
)  # fmt: skip
def test_a_policy_without_sense_is_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        RetryPolicy(**limits)  # type: ignore[arg-type]
