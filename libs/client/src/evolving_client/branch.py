"""A branch: one context and the requests that extend it, until it is ended."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from evolving.v1 import common_pb2, gateway_pb2
from evolving_client.context import (
    ChatContext,
    Context,
    Message,
    Prompt,
    TokenContext,
    chosen_context,
    context_of,
    join,
)
from evolving_client.errors import BranchEnded, EvolvingError, InvalidRequest, UnknownBranch
from evolving_client.events import Event, Finished, Started
from evolving_client.generation import Generation
from evolving_client.options import GenerateOptions
from evolving_client.retry import Retries

if TYPE_CHECKING:
    from evolving_client.client import Client


class Branch:
    """Made by `Client.branch`, `fork` and `subagent`.

    It remembers the context: the last finished request's prompt and its output. `generate(append=…)` goes on from
    there; a request that failed, was left early or was made with `remember=False` leaves the context as it was.

    id: unique per tenant. version: the version last used; 0 while unknown (a branch taken up by its id).
    parent_id: "" for a root.
    """

    def __init__(
        self, client: Client, branch_id: str, *, parent_id: str = "", version: int, context: Context | None = None
    ) -> None:
        self.id = branch_id
        self.parent_id = parent_id
        self.version = version
        self._client = client
        self._context = context
        self._used = version == 0  # whether the cluster may know this branch
        self._rewritten = False
        self._ended = False

    @property
    def messages(self) -> tuple[dict[str, str | tuple[int, ...]], ...]:
        """The context as messages; empty when it is of another form. The model's answers carry their "token_ids"."""
        if not isinstance(self._context, ChatContext):
            return ()
        return tuple(message.as_dict() for message in self._context.messages)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The context as token ids; empty when it is of another form."""
        return self._context.token_ids if isinstance(self._context, TokenContext) else ()

    @property
    def ended(self) -> bool:
        """Whether this object ended the branch."""
        return self._ended

    def generate(
        self,
        *,
        messages: Iterable[Message] | None = None,
        text: str | None = None,
        token_ids: Iterable[int] | None = None,
        append: Prompt | None = None,
        end_after: bool = False,
        remember: bool = True,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Generate from a whole prompt, or from the remembered context with `append` at its end.

        Give one of messages, text and token_ids for a whole prompt. Without any, the context is sent, with `append`
        (of the same form: messages, text or token ids) added. end_after: end the branch once this request is over,
        whatever its outcome. remember: keep prompt and output as the context when it finishes.

        Raises InvalidRequest and BranchEnded at once; everything else from the iteration.
        """
        if self._ended:
            raise BranchEnded(f"branch {self.id} was ended")
        context = self._next_context(chosen_context(messages, text, token_ids), append)
        branch = common_pb2.BranchMetadata(branch_id=self.id, parent_branch_id=self.parent_id, end_after=end_after)

        def on_event(event: Event) -> None:
            if isinstance(event, Started):
                self._on_started(event)
            elif isinstance(event, Finished):
                if remember:
                    self._context = context.answered(event)
                self._ended = self._ended or end_after

        return self._client.start_generation(context, options, branch, prepare=self._set_version, listener=on_event)

    async def complete(
        self,
        *,
        messages: Iterable[Message] | None = None,
        text: str | None = None,
        token_ids: Iterable[int] | None = None,
        append: Prompt | None = None,
        end_after: bool = False,
        remember: bool = True,
        **options: Unpack[GenerateOptions],
    ) -> Finished:
        """`generate`, read to its end."""
        generation = self.generate(
            messages=messages,
            text=text,
            token_ids=token_ids,
            append=append,
            end_after=end_after,
            remember=remember,
            **options,
        )
        return await generation.finish()

    def extend(self, tail: Prompt) -> None:
        """Add messages, text or token ids to the end of the context, for the next request."""
        self._context = self._next_context(None, tail)

    def extend_tokens(self, token_ids: Iterable[int]) -> None:
        """Add token ids to the end of a context of token ids, for the next request."""
        tail = chosen_context(None, None, token_ids)
        assert tail is not None
        self._context = tail if self._context is None else join(self._context, tail)

    def compact(self, prompt: Prompt | None = None) -> None:
        """Replace the context, or announce that the next request's prompt is a rewrite.

        The next request carries the next version, so the cluster drops what only the old context needed.
        """
        if prompt is not None:
            self._context = context_of(prompt)
        self._rewritten = self._used

    def fork(self, branch_id: str | None = None) -> Branch:
        """A child that starts with this branch's context."""
        return self._child(branch_id, self._context)

    def subagent(self, branch_id: str | None = None) -> Branch:
        """A child that starts with nothing."""
        return self._child(branch_id, None)

    async def info(self) -> common_pb2.Branch:
        """What the cluster knows of this branch. Raises UnknownBranch when it knows nothing."""
        return await self._client.read_branch(self.id)

    async def end(self, *, subtree: bool = False) -> None:
        """Tell that this context won't be continued; with `subtree` neither will its descendants. Repeats are fine."""
        if self._used or subtree:
            await self._client.end([self.id], subtree=subtree)
        self._ended = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ended:
            return
        try:
            await self.end()
        except EvolvingError as failure:
            if error is None:
                raise
            error.add_note(f"branch {self.id} could not be ended: {failure}")

    def _child(self, branch_id: str | None, context: Context | None) -> Branch:
        return Branch(self._client, branch_id or new_id(), parent_id=self.id, version=1, context=context)

    def _next_context(self, whole: Context | None, append: Prompt | None) -> Context:
        if whole is not None:
            if append is not None:
                raise InvalidRequest("append adds to the remembered context: give it, or a whole prompt, not both")
            return whole
        if append is None:
            if self._context is None:
                raise InvalidRequest("this branch has no context yet: give messages, text or token_ids")
            return self._context
        return context_of(append) if self._context is None else join(self._context, context_of(append))

    async def _set_version(self, request: gateway_pb2.GenerateRequest, retries: Retries) -> None:
        """Called before the first sending."""
        if self._rewritten and self.version == 0:
            try:
                self.version = (await self._client.read_branch(self.id, retries)).version
            except UnknownBranch:
                self._rewritten = False  # it is new: there is nothing to rewrite
        self._used = True
        request.branch.version = self.version + 1 if self._rewritten else self.version

    def _on_started(self, started: Started) -> None:
        if started.version > self.version:
            self.version = started.version
            self._rewritten = False


def new_id() -> str:
    """An id nobody else has."""
    return uuid.uuid4().hex
