"""`evolvectl models` and `evolvectl generate`: a quick look through a gateway."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass

from evolving.v1 import gateway_pb2
from evolving_client.client import Client
from evolving_client.ctl import output
from evolving_client.ctl.cluster import Cluster
from evolving_client.ctl.failure import from_error
from evolving_client.ctl.plain import Plain
from evolving_client.errors import EvolvingError
from evolving_client.events import Finished, Tokens
from evolving_client.options import GenerateOptions


@dataclass(frozen=True, slots=True)
class Ask:
    """What to generate from. branch_id "": no branch. raw: the prompt as text, without the chat template."""

    prompt: str
    system: str = ""
    raw: bool = False
    branch_id: str = ""
    model: str = ""
    max_tokens: int = 128
    temperature: float = 0.0


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
    """Generate, writing the text to stdout as it comes when `stream` is set. Raises Failure."""
    addresses = await cluster.addresses("gateway")
    options = cluster.options
    sampling: GenerateOptions = {"max_tokens": ask.max_tokens, "temperature": ask.temperature}
    system = [{"role": "system", "content": ask.system}] if ask.system else []
    messages = None if ask.raw else [*system, {"role": "user", "content": ask.prompt}]
    text = ask.prompt if ask.raw else None
    async with Client(*addresses, token=options.token, model=ask.model, timeout_s=options.timeout_s) as client:
        try:
            if ask.branch_id:
                generation = client.branch(ask.branch_id).generate(messages=messages, text=text, **sampling)
            else:
                generation = client.generate(messages=messages, text=text, **sampling)
            async for event in generation:
                if isinstance(event, Tokens) and stream:
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
                if isinstance(event, Finished):
                    return event
        except EvolvingError as error:
            raise from_error(error, f"the gateway at {', '.join(addresses)}", options.timeout_s) from error
    raise AssertionError("a generation ends with its result or an error")


def as_json(finished: Finished) -> Plain:
    """The documented form: the fields of evolving_client.Finished."""
    return {**asdict(finished), "reason": finished.reason.value}


def summary(finished: Finished) -> str:
    """One line about how it went."""
    usage, cached, timings = finished.usage, finished.cached, finished.timings
    return (
        f"[{finished.reason.value} · {usage.prompt_tokens} prompt tokens, {usage.cached_tokens} reused "
        f"(L1 {cached.own_l1}, L2 {cached.own_l2}, peer {cached.peer_l2}) · {usage.output_tokens} output tokens · "
        f"{finished.prefill_node_id}→{finished.decode_node_id} · TTFT {timings.ttft_s:.3f} s, "
        f"{timings.total_s:.3f} s in all]"
    )
