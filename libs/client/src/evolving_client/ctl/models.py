"""`evolvectl models` and `evolvectl generate`: a quick look through a gateway."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from enum import Enum

from evolving.v1 import gateway_pb2
from evolving_client.client import Client
from evolving_client.context import Message
from evolving_client.ctl import output
from evolving_client.ctl.cluster import Cluster
from evolving_client.ctl.failure import from_error, unreachable, usage
from evolving_client.ctl.plain import Plain
from evolving_client.errors import EvolvingError
from evolving_client.events import Event, Finished, Tokens
from evolving_client.options import GenerateOptions
from evolving_client.retry import RetryPolicy


@dataclass(frozen=True, slots=True)
class Ask:
    """What to generate from: messages, text or token ids. branch_id "": no branch."""

    messages: tuple[Message, ...] | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    branch_id: str = ""
    model: str = ""
    max_tokens: int = 128
    temperature: float = 0.0


def read_ask(prompt: str, *, system: str, raw: bool, token_ids: bool) -> Ask:
    """The prompt in the form the operator chose. Raises Failure for forms that exclude each other, or bad ids."""
    if system and (raw or token_ids):
        raise usage("--system belongs to the chat template; leave out --raw and --token-ids")
    if raw and token_ids:
        raise usage("give one of --raw and --token-ids")
    if token_ids:
        words = prompt.replace(",", " ").split()
        if not words or not all(word.isascii() and word.isdigit() for word in words):
            raise usage("with --token-ids the prompt is whole numbers, separated by spaces or commas")
        return Ask(token_ids=tuple(int(word) for word in words))
    if raw:
        return Ask(text=prompt)
    before = ({"role": "system", "content": system},) if system else ()
    return Ask(messages=(*before, {"role": "user", "content": prompt}))


async def list_models(cluster: Cluster) -> gateway_pb2.ListModelsResponse:
    """What the live nodes serve."""
    return await cluster.call("gateway", "ListModels", gateway_pb2.ListModelsRequest(), gateway_pb2.ListModelsResponse)


def print_models(answer: gateway_pb2.ListModelsResponse) -> None:
    """One row a model."""
    output.print_table(
        ["model", ">nodes", ">vocabulary", ">prompt tokens", ">context tokens", ">block tokens"],
        [
            [
                model.model,
                str(model.nodes),
                str(model.vocabulary_tokens),
                str(model.max_prompt_tokens),
                str(model.max_context_tokens),
                str(model.block_tokens),
            ]
            for model in answer.models
        ],
    )


async def generate(cluster: Cluster, ask: Ask, *, stream: bool) -> Finished:
    """Generate, writing the output to stdout as it comes when `stream` is set: text, or ids for ids.

    The time limit is one between events: a long output is no reason to give up. Raises Failure.
    """
    addresses = await cluster.addresses("gateway")
    options = cluster.options
    what, written = f"the gateway at {', '.join(addresses)}", False
    sampling: GenerateOptions = {"max_tokens": ask.max_tokens, "temperature": ask.temperature}
    retry = _policy(options.timeout_s, len(addresses))
    async with Client(*addresses, token=options.token, model=ask.model, retry=retry) as client:
        try:
            source = client.branch(ask.branch_id) if ask.branch_id else client
            generation = source.generate(messages=ask.messages, text=ask.text, token_ids=ask.token_ids, **sampling)
            async for event in _within(options.timeout_s, generation):
                if isinstance(event, Tokens) and stream:
                    written = True
                    ids = "".join(f"{token_id} " for token_id in event.token_ids)
                    sys.stdout.write(event.text if ask.token_ids is None else ids)
                    sys.stdout.flush()
                if isinstance(event, Finished):
                    return event
        except (EvolvingError, TimeoutError) as error:
            if written:
                sys.stdout.write("\n")  # the line about the failure stands alone
                sys.stdout.flush()
            if isinstance(error, EvolvingError):
                raise from_error(error, what, options.timeout_s) from error
            raise unreachable(
                f"{what} sent nothing for {options.timeout_s:g} s; see that it runs with evolvectl status, "
                "or try a longer --timeout-s"
            ) from error
    raise AssertionError("a generation ends with its result or an error")


def _policy(limit_s: float, gateways: int) -> RetryPolicy:
    """Retries that are over before the time limit is, so that what is reported is why they failed."""
    failures = 6 * gateways
    longest_s = limit_s / (2 * failures)
    return RetryPolicy(max_failures=failures, initial_backoff_s=min(0.1, longest_s), max_backoff_s=longest_s)


async def _within(limit_s: float, events: AsyncIterator[Event]) -> AsyncIterator[Event]:
    """The events. Raises TimeoutError when the next one takes longer than this."""
    while True:
        try:
            async with asyncio.timeout(limit_s):
                event = await anext(events)
        except StopAsyncIteration:
            return
        yield event


def as_json(finished: Finished) -> Plain:
    """The documented form: the fields of evolving_client.Finished."""
    return asdict(finished, dict_factory=_words)


def _words(fields: list[tuple[str, object]]) -> Plain:
    """Enums as their words."""
    return {name: value.value if isinstance(value, Enum) else value for name, value in fields}


def summary(finished: Finished) -> str:
    """One line about how it went."""
    usage, cached, timings = finished.usage, finished.cached, finished.timings
    return (
        f"[{finished.reason.value} · {usage.prompt_tokens} prompt tokens, {usage.cached_tokens} reused "
        f"(L1 {cached.own_l1}, L2 {cached.own_l2}, peer {cached.peer_l2}) · {usage.output_tokens} output tokens · "
        f"{finished.prefill_node_id}→{finished.decode_node_id} · TTFT {timings.ttft_s:.3f} s, "
        f"{timings.total_s:.3f} s in all]"
    )
