"""What can be asked of one generation, beside its prompt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

from evolving.v1 import gateway_pb2
from evolving_client.errors import InvalidRequest


class SamplingOptions(TypedDict, total=False):
    """How tokens are drawn. What is left out takes the service's default: greedy, at most 512 tokens."""

    max_tokens: int
    """Output tokens at most."""
    temperature: float
    """0 is greedy."""
    top_p: float
    """Share of probability considered, (0, 1]."""
    top_k: int
    """Most likely tokens considered; 0: all."""
    min_p: float
    """Tokens below this share of the most likely one's probability are left out, [0, 1]."""
    frequency_penalty: float
    """[-2, 2]."""
    presence_penalty: float
    """[-2, 2]."""
    repetition_penalty: float
    """(0, 2]."""
    stop: Iterable[str]
    """The output ends before the first of these texts; at most 16."""
    stop_token_ids: Iterable[int]
    """The output ends after the first of these tokens; at most 64."""
    ignore_eos: bool
    """Go on after the model's end token."""
    seed: int


class GenerateOptions(SamplingOptions, total=False):
    """Sampling, and how the request is handled."""

    model: str
    """Left out: the client's, or the only one served."""
    priority: int
    """Larger goes first among queued requests, -100 to 100."""
    request_id: str
    """Names the request; the same id again is the same request. Left out: a new one."""
    timeout_s: float
    """Seconds for the whole request, reconnects and waits included. Left out: the client's; None there: no limit."""


_REQUEST_FIELDS = ("model", "priority", "request_id")


def write_options(options: GenerateOptions, request: gateway_pb2.GenerateRequest) -> None:
    """Set the options that are given. Raises InvalidRequest for an unknown name or a value of the wrong kind."""
    for name, value in options.items():
        try:
            if name in _REQUEST_FIELDS:
                setattr(request, name, value)
            elif name == "stop" and isinstance(value, str):
                raise InvalidRequest('stop is a list of texts: stop=["…"]')
            elif name in ("stop", "stop_token_ids"):
                getattr(request.sampling, name).extend(value)
            elif name in SamplingOptions.__annotations__:
                setattr(request.sampling, name, value)
            elif name != "timeout_s":
                raise InvalidRequest(f"unknown option {name!r}")
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"bad value for {name}: {error}") from error
