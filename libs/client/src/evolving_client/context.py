"""A branch's context in one of three forms: chat messages, plain text or token ids.

Token ids and messages repeat the model's own output exactly: a branch keeps the ids of each answer it got beside its
text and sends them verbatim. Text is tokenised anew at every turn, and an output's text may not give the ids that were
sampled; reuse then ends where they first differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, Self

from evolving.v1 import gateway_pb2
from evolving_client.errors import InvalidRequest
from evolving_client.events import Finished, encode_token_ids

Message = Mapping[str, object]
"""`{"role": "user", "content": "…"}`; roles as the model's template knows them: system, user, assistant, tool.

An answer of the model may carry "token_ids", its output ids, which then stand in the prompt in place of the content."""

Prompt = str | Iterable[Message] | Iterable[int]
"""Text, messages or token ids."""


class WritesPrompt(Protocol):
    """What a request's prompt comes from: a context, or ids that a tool has encoded already."""

    def write_to(self, request: gateway_pb2.GenerateRequest) -> None:
        """Set the request's prompt."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a chat. token_ids: the ids it was generated as; empty for what no model wrote."""

    role: str
    content: str
    token_ids: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, str | tuple[int, ...]]:
        """The message as a harness writes it."""
        plain: dict[str, str | tuple[int, ...]] = {"role": self.role, "content": self.content}
        return {**plain, "token_ids": self.token_ids} if self.token_ids else plain


@dataclass(frozen=True, slots=True)
class ChatContext:
    """Messages, rendered with the model's chat template by the gateway."""

    messages: tuple[ChatMessage, ...]

    def extended(self, tail: Self) -> ChatContext:
        """This context, then `tail`."""
        return ChatContext(self.messages + tail.messages)

    def answered(self, finished: Finished) -> ChatContext:
        """This context and the output, as the assistant's message."""
        return ChatContext((*self.messages, ChatMessage("assistant", finished.text, finished.output_token_ids)))

    def write_to(self, request: gateway_pb2.GenerateRequest) -> None:
        """Set the request's prompt."""
        request.chat.SetInParent()
        for message in self.messages:
            ids = encode_token_ids(message.token_ids)
            request.chat.messages.add(role=message.role, content=message.content, token_ids=ids)


@dataclass(frozen=True, slots=True)
class TextContext:
    """Text, tokenised without a template by the gateway."""

    text: str

    def extended(self, tail: Self) -> TextContext:
        """This context, then `tail`."""
        return TextContext(self.text + tail.text)

    def answered(self, finished: Finished) -> TextContext:
        """This context and the output's text."""
        return TextContext(self.text + finished.text)

    def write_to(self, request: gateway_pb2.GenerateRequest) -> None:
        """Set the request's prompt."""
        request.text = self.text


@dataclass(frozen=True, slots=True)
class TokenContext:
    """Token ids, used as they are."""

    token_ids: tuple[int, ...]

    def extended(self, tail: Self) -> TokenContext:
        """This context, then `tail`."""
        return TokenContext(self.token_ids + tail.token_ids)

    def answered(self, finished: Finished) -> TokenContext:
        """This context and the output, id by id."""
        return TokenContext(self.token_ids + finished.output_token_ids)

    def write_to(self, request: gateway_pb2.GenerateRequest) -> None:
        """Set the request's prompt."""
        request.token_ids = encode_token_ids(self.token_ids)


Context = ChatContext | TextContext | TokenContext


def context_of(prompt: Prompt) -> Context:
    """The prompt in its form. An empty list is an empty chat. Raises InvalidRequest for anything else."""
    if isinstance(prompt, str):
        return TextContext(prompt)
    if isinstance(prompt, Mapping):
        raise InvalidRequest("a prompt is a list of messages, not one message: put it in brackets")
    items = tuple(prompt)
    if not items or isinstance(items[0], Mapping):
        return ChatContext(tuple(_message(item) for item in items))
    return TokenContext(tuple(_token_id(item) for item in items))


def chosen_context(
    messages: Iterable[Message] | None, text: str | None, token_ids: Iterable[int] | None
) -> Context | None:
    """The one that is given; None when none is. Raises InvalidRequest when several are."""
    given: list[Context] = []
    if messages is not None:
        given.append(ChatContext(tuple(_message(message) for message in messages)))
    if text is not None:
        given.append(TextContext(text))
    if token_ids is not None:
        given.append(TokenContext(tuple(_token_id(token_id) for token_id in token_ids)))
    if len(given) > 1:
        raise InvalidRequest("give one of messages, text and token_ids")
    return given[0] if given else None


def join(context: Context, tail: Context) -> Context:
    """`context`, then `tail`. Raises InvalidRequest when they are of different forms."""
    if isinstance(context, ChatContext) and isinstance(tail, ChatContext):
        return context.extended(tail)
    if isinstance(context, TextContext) and isinstance(tail, TextContext):
        return context.extended(tail)
    if isinstance(context, TokenContext) and isinstance(tail, TokenContext):
        return context.extended(tail)
    raise InvalidRequest(f"can't append {_FORMS[type(tail)]} to a context of {_FORMS[type(context)]}")


_FORMS: dict[type[Context], str] = {ChatContext: "messages", TextContext: "text", TokenContext: "token ids"}


def _message(item: object) -> ChatMessage:
    if not isinstance(item, Mapping) or set(item) - {"token_ids"} != {"role", "content"}:
        raise InvalidRequest(f'a message is {{"role": "…", "content": "…"}}, not {item!r}')
    role, content = item["role"], item["content"]
    if not isinstance(role, str) or not isinstance(content, str):
        raise InvalidRequest(f"role and content of a message are text: {item!r}")
    token_ids = item.get("token_ids", ())
    if not isinstance(token_ids, Iterable):
        raise InvalidRequest(f"token_ids of a message are whole numbers: {token_ids!r}")
    return ChatMessage(role, content, tuple(_token_id(token_id) for token_id in token_ids))


def _token_id(item: object) -> int:
    if isinstance(item, bool) or not hasattr(item, "__index__"):
        raise InvalidRequest(f"a token id is an integer, not {item!r}")
    return int(item.__index__())
