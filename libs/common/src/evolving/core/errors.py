"""Expected failures of the core. Each has a stable `code`; the wire maps the code to one gRPC status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class CoreError(Exception):
    """Base of all expected failures of the core. Bugs assert instead.

    code: stable UPPER_SNAKE name clients may branch on.
    metadata: facts a client can act on, as strings (for example {"current_version": "3"}).
    """

    code: ClassVar[str] = "CORE_ERROR"

    def __init__(self, message: str, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.metadata: Mapping[str, str] = dict(metadata or {})


class InvalidArgument(CoreError):
    """The call can't be served as it is, whatever the state."""

    code = "INVALID_ARGUMENT"


class BrokenChain(InvalidArgument):
    """A block name appears under two different parents, which chained digests never do: the names are not digests."""

    code = "BROKEN_CHAIN"


class RequestConflict(InvalidArgument):
    """A request id was used before with another body."""

    code = "REQUEST_CONFLICT"


class BranchEnded(CoreError):
    """The branch was ended; its id can't be used again while its tombstone lasts."""

    code = "BRANCH_ENDED"


class StaleVersion(CoreError):
    """The version given is lower than the branch's current one; nothing changed."""

    code = "STALE_VERSION"

    def __init__(self, current: int) -> None:
        super().__init__(f"the branch is at version {current}", {"current_version": str(current)})
        self.current = current


class NeedFull(CoreError):
    """The base the caller builds on is not known here; nothing changed. Send all names of the context."""

    code = "NEED_FULL"


class UnknownNode(CoreError):
    """An event of a node that is not up."""

    code = "UNKNOWN_NODE"


class StaleIncarnation(CoreError):
    """An event of an earlier (or not yet announced) life of a node's engine."""

    code = "STALE_INCARNATION"
