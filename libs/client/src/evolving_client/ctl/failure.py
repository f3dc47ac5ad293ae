"""How evolvectl fails: one line that says what happened and what to do, and an exit code."""

from __future__ import annotations

from enum import IntEnum

from evolving_client.errors import DeadlineExceeded, EvolvingError, Unauthenticated, Unavailable


class ExitCode(IntEnum):
    """What a script may branch on."""

    OK = 0
    REFUSED = 1
    """A service refused the request, or an audit found a mismatch."""
    USAGE = 2
    """The command line makes no sense."""
    UNREACHABLE = 3
    """Something that has to answer didn't."""


class Failure(Exception):
    """Ends the command with a line on stderr."""

    def __init__(self, code: ExitCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def refused(message: str) -> Failure:
    """A service said no."""
    return Failure(ExitCode.REFUSED, message)


def usage(message: str) -> Failure:
    """The operator's input makes no sense."""
    return Failure(ExitCode.USAGE, message)


def unreachable(message: str) -> Failure:
    """No answer."""
    return Failure(ExitCode.UNREACHABLE, message)


def from_error(error: EvolvingError, what: str, timeout_s: float) -> Failure:
    """The failure behind a failed call to `what`, such as "the planner at 127.0.0.1:7001"."""
    if isinstance(error, DeadlineExceeded):
        return unreachable(f"{what} did not answer within {timeout_s:g} s; try a longer --timeout-s")
    if isinstance(error, Unavailable):
        if error.reason:  # the service itself said so
            return unreachable(f"{what} can't serve yet: {error}; see evolvectl status")
        if "Connection refused" in str(error):  # as the system words it, inside gRPC's message
            return unreachable(
                f"{what} refused the connection: nothing listens there; "
                "start it, or find one that runs: evolvectl status"
            )
        return unreachable(f"{what} can't be reached; see that it runs: evolvectl status")
    if error.reason == "NOT_LEADER":
        return refused(f"{what} does not lead, and no leader answers: wait for one, evolvectl status shows who leads")
    if isinstance(error, Unauthenticated):
        return refused(f"{what} refused: {error}; give a token that may do this with --token-file")
    return refused(f"{what} refused: {error}")
