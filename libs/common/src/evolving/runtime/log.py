"""Structured logs: one JSON object a line on stderr, with the ids of the call it belongs to."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, Literal, TextIO

import structlog

LogFormat = Literal["json", "console"]
LogLevel = Literal["debug", "info", "warning", "error"]

_REDACTED = "[redacted]"
_SECRET_WORDS = ("token", "secret", "password", "authorization", "credential", "api_key")
# Fields that contain a secret word and are counts, sizes or places, never secrets.
_PLAIN_SUFFIXES = ("_tokens", "tokens", "_file", "token_ids", "_s", "_count")


def is_secret(name: str) -> bool:
    """Whether a field of this name must not be written: "authorization", "bearer_token", but not "prompt_tokens"."""
    lowered = name.lower()
    return any(word in lowered for word in _SECRET_WORDS) and not lowered.endswith(_PLAIN_SUFFIXES)


def _redact(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for name, value in event.items():
        if is_secret(name):
            event[name] = _REDACTED
        elif isinstance(value, Mapping):
            event[name] = {k: _REDACTED if is_secret(str(k)) else v for k, v in value.items()}
    return event


def configure(
    service: str, level: LogLevel = "info", log_format: LogFormat = "json", stream: TextIO | None = None
) -> None:
    """Set up logging of this process; standard `logging` records (grpc's, a library's) join the same stream.

    service: the service's name, in every line.
    stream: where lines go; stderr when None.
    """
    out = stream or sys.stderr
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.StackInfoRenderer(),
        lambda _logger, _method, event: {"service": service, **event},
        _redact,
    ]
    final: list[structlog.types.Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if log_format == "json":
        # Local variables hold prompts and tokens, which no log may.
        traces = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        final += [structlog.processors.ExceptionRenderer(traces), structlog.processors.JSONRenderer(sort_keys=False)]
    else:
        plain = structlog.dev.plain_traceback  # the others show local variables
        final += [structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=plain)]
    handler = logging.StreamHandler(out)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=final))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def get_logger(name: str = "evolving") -> structlog.stdlib.BoundLogger:
    """A logger whose lines carry the ids bound by `log_context`. Call as `log.info("event_name", key=value)`."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


@contextmanager
def log_context(*, request_id: str = "", branch_id: str = "", tenant: str = "", **more: str) -> Iterator[None]:
    """Bind ids to every line logged by this task (and tasks it starts) inside the block; empty ones are left out."""
    ids = {"request_id": request_id, "branch_id": branch_id, "tenant": tenant, **more}
    with structlog.contextvars.bound_contextvars(**{name: value for name, value in ids.items() if value}):
        yield


def current_ids() -> dict[str, str]:
    """The ids bound now, for a call to another service to carry on."""
    bound = structlog.contextvars.get_contextvars()
    return {name: bound[name] for name in ("request_id", "branch_id") if name in bound}
