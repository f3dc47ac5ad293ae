"""What a client may ask for, and the defaults of what it leaves out. Raises InvalidRequest subclasses."""

from __future__ import annotations

import hashlib
import math
import uuid
from dataclasses import dataclass

from evolving.runtime.errors import InvalidRequest
from evolving.v1 import gateway_pb2
from evolving_gateway.errors import EmptyPrompt, NoTokenizer, PromptTooLong
from evolving_gateway.router import ModelFacts
from evolving_gateway.token_ids import TokenIds, check_vocabulary, from_wire, to_wire
from evolving_gateway.tokens import Message, Tokenizer

DEFAULT_MAX_TOKENS = 512
LONGEST_ID_BYTES = 256
MOST_ENDED_BRANCHES = 1000
_MOST_STOPS = 16
_LONGEST_STOP_BYTES = 1024
_MOST_STOP_IDS = 64
_MOST_MESSAGES = 10_000
_PRIORITY_MAX = 100


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's prompt and what is known of its output already."""

    tokens: bytes  # ids as on the wire
    resumed: list[int]  # output ids an earlier call delivered

    @property
    def length(self) -> int:
        """Prompt tokens."""
        return len(self.tokens) // 4


def check_request(request: gateway_pb2.GenerateRequest) -> None:
    """Everything that can be said of a request without its model."""
    check_id(request.request_id, "request_id", may_be_empty=True)
    check_id(request.model, "model", may_be_empty=True)
    if abs(request.priority) > _PRIORITY_MAX:
        raise InvalidRequest(f"priority is {request.priority}; it must be from -{_PRIORITY_MAX} to {_PRIORITY_MAX}")
    _check_branch(request)
    _check_sampling(request.sampling)
    if request.WhichOneof("prompt") is None:
        raise EmptyPrompt("the request has no prompt: set text, chat or token_ids")
    if len(request.resume_token_ids) != 4 * request.resume_from:
        raise InvalidRequest(
            f"resume_token_ids has {len(request.resume_token_ids)} bytes; resume_from {request.resume_from} needs "
            f"{4 * request.resume_from}"
        )


def check_id(value: str, field: str, *, may_be_empty: bool = False) -> None:
    """An id of 1 to 256 bytes without control characters."""
    length = len(value.encode())
    if (not length and not may_be_empty) or length > LONGEST_ID_BYTES:
        raise InvalidRequest(f"{field} has {length} bytes; it must have 1 to {LONGEST_ID_BYTES}")
    if not value.isprintable():
        raise InvalidRequest(f"{field} has control characters")


def body_digest(request: gateway_pb2.GenerateRequest) -> bytes:
    """What makes two calls with one request id the same request: everything but the id and where to resume."""
    body = gateway_pb2.GenerateRequest()
    body.CopyFrom(request)
    for field in ("request_id", "resume_from", "resume_token_ids"):
        body.ClearField(field)
    return hashlib.sha256(body.SerializeToString(deterministic=True)).digest()


def new_request_id() -> str:
    """For a client that named none."""
    return uuid.uuid4().hex


async def read_prompt(request: gateway_pb2.GenerateRequest, model: ModelFacts, tokenizer: Tokenizer | None) -> Prompt:
    """The prompt's ids, checked against the model's vocabulary and limits."""
    ids = await _prompt_ids(request, model, tokenizer)
    if ids.size == 0:
        raise EmptyPrompt("the prompt has no tokens")
    if ids.size > model.max_prompt_tokens or ids.size >= model.max_context_tokens:
        longest = min(model.max_prompt_tokens, model.max_context_tokens - 1)
        raise PromptTooLong(f"the prompt has {ids.size} tokens; {model.model} takes at most {longest}")
    resumed = from_wire(request.resume_token_ids, model.vocabulary_tokens, "resume_token_ids")
    longest = min(model.max_prompt_tokens, model.max_context_tokens)
    if ids.size + resumed.size > longest:
        together = ids.size + resumed.size
        raise PromptTooLong(
            f"prompt and resume_token_ids have {together} tokens; {model.model} takes at most {longest}"
        )
    return Prompt(to_wire(ids), resumed.tolist())


async def _prompt_ids(request: gateway_pb2.GenerateRequest, model: ModelFacts, tokenizer: Tokenizer | None) -> TokenIds:
    kind = request.WhichOneof("prompt")
    if kind == "token_ids":
        return from_wire(request.token_ids, model.vocabulary_tokens, "token_ids")
    if tokenizer is None:
        raise NoTokenizer(f"this gateway has no tokenizer: send token_ids instead of {kind}")
    if kind == "text":
        ids = await tokenizer.encode_text(request.text)
    else:
        ids = await tokenizer.encode_chat(_messages(request.chat, model))
    check_vocabulary(ids, model.vocabulary_tokens, f"{kind} (is the gateway's tokenizer this model's?)")
    return ids


def _messages(chat: gateway_pb2.ChatPrompt, model: ModelFacts) -> list[Message]:
    if not 0 < len(chat.messages) <= _MOST_MESSAGES:
        raise EmptyPrompt(f"chat has {len(chat.messages)} messages; it must have 1 to {_MOST_MESSAGES}")
    messages = []
    for at, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidRequest(f"chat.messages[{at}] has no role")
        ids = from_wire(message.token_ids, model.vocabulary_tokens, f"chat.messages[{at}].token_ids")
        messages.append(Message(message.role, message.content, ids if ids.size else None))
    return messages


def fill_sampling(
    sampling: gateway_pb2.Sampling, prompt_tokens: int, model: ModelFacts, eos_ids: frozenset[int]
) -> gateway_pb2.Sampling:
    """Sampling for the engine: defaults filled in, max_tokens cut to the context, the model's end tokens among the
    stop tokens, stop texts left out (they are the gateway's business)."""
    filled = gateway_pb2.Sampling()
    filled.CopyFrom(sampling)
    filled.max_tokens = min(sampling.max_tokens or DEFAULT_MAX_TOKENS, model.max_context_tokens - prompt_tokens)
    filled.top_p = sampling.top_p or 1.0
    filled.repetition_penalty = sampling.repetition_penalty or 1.0
    del filled.stop[:]
    if not sampling.ignore_eos:
        room = _MOST_STOP_IDS - len(sampling.stop_token_ids)  # nodes take no more; engines know their own end tokens
        filled.stop_token_ids.extend(sorted(eos_ids - set(sampling.stop_token_ids))[:room])
    return filled


def _check_branch(request: gateway_pb2.GenerateRequest) -> None:
    branch = request.branch
    check_id(branch.branch_id, "branch.branch_id", may_be_empty=True)
    check_id(branch.parent_branch_id, "branch.parent_branch_id", may_be_empty=True)
    if not branch.branch_id and (branch.version or branch.parent_branch_id or branch.end_after):
        raise InvalidRequest("branch.branch_id is empty but other branch fields are set")
    if branch.branch_id and branch.branch_id == branch.parent_branch_id:
        raise InvalidRequest("branch.parent_branch_id is the branch itself")


def _check_sampling(sampling: gateway_pb2.Sampling) -> None:
    _check_range(sampling.temperature, 0, 100, "temperature")
    _check_range(sampling.top_p, 0, 1, "top_p")
    _check_range(sampling.min_p, 0, 1, "min_p")
    _check_range(sampling.frequency_penalty, -2, 2, "frequency_penalty")
    _check_range(sampling.presence_penalty, -2, 2, "presence_penalty")
    _check_range(sampling.repetition_penalty, 0, 2, "repetition_penalty")
    if len(sampling.stop) > _MOST_STOPS:
        raise InvalidRequest(f"sampling.stop has {len(sampling.stop)} texts; at most {_MOST_STOPS}")
    for stop in sampling.stop:
        if not 0 < len(stop.encode()) <= _LONGEST_STOP_BYTES:
            raise InvalidRequest(f"sampling.stop: each text must have 1 to {_LONGEST_STOP_BYTES} bytes")
    if len(sampling.stop_token_ids) > _MOST_STOP_IDS:
        raise InvalidRequest(
            f"sampling.stop_token_ids has {len(sampling.stop_token_ids)} ids; at most {_MOST_STOP_IDS}"
        )


def _check_range(value: float, low: float, high: float, name: str) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(f"sampling.{name} is {value:g}; it must be from {low} to {high}")
