"""What can go wrong with a request, as its client sees it. Each has one gRPC status and a stable reason."""

from __future__ import annotations

import grpc

from evolving.runtime.errors import InvalidRequest, ServiceError


class EmptyPrompt(InvalidRequest):
    """The prompt has no tokens."""

    reason = "EMPTY_PROMPT"


class PromptTooLong(InvalidRequest):
    """The prompt, or prompt and resumed output, exceeds what the model's nodes take."""

    reason = "PROMPT_TOO_LONG"


class TooLongToMove(ServiceError):
    """The request lost its nodes, and prompt and output together exceed what another node prefills."""

    reason = "TOO_LONG_TO_MOVE"
    status = grpc.StatusCode.UNAVAILABLE


class BadTokens(InvalidRequest):
    """Token bytes whose length is no multiple of 4, or an id outside the model's vocabulary."""

    reason = "BAD_TOKENS"


class NoTokenizer(ServiceError):
    """This gateway was started without a tokenizer and takes token ids only."""

    reason = "NO_TOKENIZER"
    status = grpc.StatusCode.FAILED_PRECONDITION


class BadTemplate(InvalidRequest):
    """The model's chat template refuses these messages."""

    reason = "BAD_MESSAGES"


class RequestConflict(InvalidRequest):
    """The request id was used before with another body."""

    reason = "REQUEST_CONFLICT"


class Superseded(ServiceError):
    """A later call with the same request id took over."""

    reason = "SUPERSEDED"
    status = grpc.StatusCode.ABORTED


class UnknownModel(ServiceError):
    """No live node serves this model."""

    reason = "UNKNOWN_MODEL"
    status = grpc.StatusCode.NOT_FOUND


class NoNode(ServiceError):
    """No node can serve the request now."""

    reason = "NO_NODE"
    status = grpc.StatusCode.UNAVAILABLE


class QueueFull(ServiceError):
    """Too much is queued; come back after `retry_after_s`."""

    reason = "QUEUE_FULL"
    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class DirectoryAway(ServiceError):
    """The directory does not answer, and this call can't be answered without it."""

    reason = "DIRECTORY_AWAY"
    status = grpc.StatusCode.UNAVAILABLE


class DirectoryRefused(ServiceError):
    """The directory's own answer, passed on: BRANCH_ENDED, STALE_VERSION, NOT_FOUND and the like."""

    def __init__(
        self, status: grpc.StatusCode, reason: str, message: str, metadata: dict[str, str] | None = None
    ) -> None:
        super().__init__(message, metadata=metadata)
        self.status = status  # type: ignore[misc]  # of this answer, not of the class
        self.reason = reason  # type: ignore[misc]


class InvalidModelChoice(InvalidRequest):
    """Several models are served and the request names none."""

    reason = "MODEL_NOT_NAMED"
