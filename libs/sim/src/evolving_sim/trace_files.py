"""Reads traces: agent sessions in the Weka/AgentX form, and Mooncake's request trace. Plain, .gz and .xz.

Both are JSON lines. Weka/AgentX, one session a line: `id`, `block_size`, `hash_id_scope` ("local": ids of this session
only) and `requests`, each either a request of the main agent (`t` and `api_time` in seconds, `in`, `out`, `hash_ids`
of the prompt's full blocks, `think_time` since the last answer) or `{"type": "subagent", "agent_id", "t",
"duration_ms", "status", "requests"}` with times from the sub-agent's own start. `t` of a sub-agent is when its end was
seen, so it started `duration_ms` before; one with status "async_launched" runs in the background and `t` is its start.
A request may leave out the first `shared_blocks` of its ids (default 0), which are those of the agent's last request:
most of them are, and a long trace is then read in a twentieth of the time.

Mooncake, one request a line: `timestamp` in milliseconds, `input_length`, `output_length`, `hash_ids` of 512-token
blocks, the last of which may be part of a block.
"""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from evolving_sim.traces import BlockIds, TraceAgent, TraceRequest, TraceSession, sharing_memory

MOONCAKE_BLOCK_TOKENS = 512
_MOST_BLOCK_TOKENS = 1 << 16
_MOST_TOKENS = (1 << 32) - 1  # of a prompt or an answer
_MOST_TIME = 1e15  # in milliseconds or seconds; those since 1970 are less
Row = dict[str, Any]


class TraceError(Exception):
    """A trace that can't be read: which file, which line (from 1), why."""

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(f"{path}:{line}: {reason}")
        self.path, self.line, self.reason = path, line, reason


class _Invalid(Exception):
    """What is wrong with a line."""


def read_sessions(path: Path) -> Iterator[TraceSession]:
    """The sessions of a trace, one at a time, in the file's order. The form is told from each line's own fields.

    Raises TraceError at the first line that isn't a session, and OSError where there is no such file.
    """
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    yield _session(line, number)
    except (_Invalid, ValueError, RecursionError) as error:  # what json raises on text of all kinds
        raise TraceError(path, max(number, 1), str(error)) from error
    except (lzma.LZMAError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise TraceError(path, number + 1, f"damaged archive: {error}") from error


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.open(path)  # type: ignore[return-value]  # a file of bytes in all but name
    if path.suffix == ".xz":
        return lzma.open(path)
    return path.open("rb")


def _session(line: bytes, number: int) -> TraceSession:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise _Invalid("not a JSON object")
    if "requests" in row:
        return _agents_session(row)
    if "timestamp" in row:
        return _mooncake_session(row, f"request-{number}")
    raise _Invalid("neither a session (requests) nor a request (timestamp)")


# -- Weka/AgentX


def _agents_session(row: Row) -> TraceSession:
    block_tokens = _integer(row, "block_size", least=1, most=_MOST_BLOCK_TOKENS)
    main_rows = [each for each in _rows(row) if each.get("type") != "subagent"]
    if not main_rows:
        raise _Invalid("a session without requests of a main agent")
    main = _requests(main_rows, block_tokens, 0.0)
    _tell_services(main, main_rows)
    subagents = _subagents(row, main, block_tokens)
    _tell_thinking(main, 0.0)
    for agent in subagents:
        if agent.parent_waits and agent.starts_after + 1 < len(main):
            _wait_for(main, agent)
    agents = (TraceAgent("", "", -1, False, _sharing_memory(main)), *subagents)
    if len({agent.agent_id for agent in agents}) < len(agents):
        raise _Invalid("two agents of a session have the same agent_id")
    shared = row.get("hash_id_scope", "local") != "local"
    return TraceSession(_text(row, "id"), block_tokens, shared, open_loop=False, agents=agents)


def _subagents(row: Row, main: list[TraceRequest], block_tokens: int) -> list[TraceAgent]:
    before, agents = -1, []
    for each in _rows(row):
        if each.get("type") != "subagent":
            before += 1
            continue
        background = each.get("status") == "async_launched"
        start_s = _number(each, "t") - (0.0 if background else _number(each, "duration_ms") / 1000)
        requests = _requests(_rows(each), block_tokens, start_s)
        if not requests:
            continue
        _tell_services(requests, _rows(each))
        parent_end_s = main[before].at_s + main[before].service_s if before >= 0 else 0.0
        _tell_thinking(requests, parent_end_s)
        parent_waits = not background
        agents.append(TraceAgent(_text(each, "agent_id"), "", before, parent_waits, _sharing_memory(requests)))
    return sorted(agents, key=lambda agent: (agent.starts_after, agent.requests[0].at_s))


def _requests(rows: list[Row], block_tokens: int, start_s: float) -> list[TraceRequest]:
    requests: list[TraceRequest] = []
    last = np.zeros(0, np.uint32)
    for row in rows:
        requests.append(_request(row, block_tokens, start_s, last))
        last = requests[-1].block_ids
    return requests


def _request(row: Row, block_tokens: int, start_s: float, last: BlockIds) -> TraceRequest:
    input_tokens = _integer(row, "in")
    shared = _integer(row, "shared_blocks") if "shared_blocks" in row else 0
    if shared > min(len(last), input_tokens // block_tokens):
        raise _Invalid(f"{shared} shared_blocks are more than the prompt or the last one has")
    own_ids = _block_ids(row, input_tokens // block_tokens - shared)
    block_ids = own_ids
    if shared:
        block_ids = np.concatenate((last[:shared], own_ids))
        block_ids.flags.writeable = False
    service_s = _number(row, "api_time") if "api_time" in row else 0.0
    at_s = start_s + _number(row, "t")
    return TraceRequest(at_s, input_tokens, _integer(row, "out"), block_ids, think_s=0.0, service_s=service_s)


def _tell_services(requests: list[TraceRequest], rows: list[Row]) -> None:
    """Where a row has no `api_time` its answer ended `think_time` before the next request."""
    for index, row in enumerate(rows[:-1]):
        if "api_time" not in row and "think_time" in rows[index + 1]:
            gap_s = requests[index + 1].at_s - requests[index].at_s - _number(rows[index + 1], "think_time")
            requests[index] = replace(requests[index], service_s=max(0.0, gap_s))


def _tell_thinking(requests: list[TraceRequest], end_s: float) -> None:
    """Times between an answer and the next request; a request that came before the answer thinks for 0 s."""
    for index, request in enumerate(requests):
        requests[index] = replace(request, think_s=max(0.0, request.at_s - end_s))
        end_s = request.at_s + request.service_s


def _wait_for(main: list[TraceRequest], agent: TraceAgent) -> None:
    """The main agent thinks only once a sub-agent it waits for has ended."""
    index, last = agent.starts_after + 1, agent.requests[-1]
    after_s = max(0.0, main[index].at_s - last.at_s - last.service_s)
    main[index] = replace(main[index], think_s=min(main[index].think_s, after_s))


def _sharing_memory(requests: list[TraceRequest]) -> tuple[TraceRequest, ...]:
    shared = sharing_memory([request.block_ids for request in requests])
    return tuple(replace(request, block_ids=ids) for request, ids in zip(requests, shared, strict=True))


# -- Mooncake


def _mooncake_session(row: Row, session_id: str) -> TraceSession:
    input_tokens = _integer(row, "input_length")
    request = TraceRequest(
        at_s=_number(row, "timestamp") / 1000,
        input_tokens=input_tokens,
        output_tokens=_integer(row, "output_length"),
        block_ids=_block_ids(row, input_tokens // MOONCAKE_BLOCK_TOKENS),
        think_s=0.0,
        service_s=0.0,
    )
    agent = TraceAgent("", "", -1, False, (request,))
    return TraceSession(session_id, MOONCAKE_BLOCK_TOKENS, ids_shared=True, open_loop=True, agents=(agent,))


# -- fields


def _rows(row: Row) -> list[Row]:
    rows = row.get("requests")
    if not isinstance(rows, list) or not all(isinstance(each, dict) for each in rows):
        raise _Invalid("requests must be a list of objects")
    return rows


def _block_ids(row: Row, full_blocks: int) -> BlockIds:
    ids = row.get("hash_ids")
    if not isinstance(ids, list) or len(ids) < full_blocks:
        raise _Invalid(f"hash_ids must list the {full_blocks} full blocks of the prompt")
    if not all(type(each) is int for each in ids):  # numpy would make something of texts, fractions and lists
        raise _Invalid("hash_ids must be whole numbers")
    try:
        array = np.array(ids[:full_blocks], dtype=np.uint32)
    except OverflowError as error:
        raise _Invalid(f"hash_ids: {error}") from error
    array.flags.writeable = False
    return array


def _integer(row: Row, name: str, least: int = 0, most: int = _MOST_TOKENS) -> int:
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise _Invalid(f"{name} must be a whole number from {least} to {most}, got {value!r}")
    return value


def _number(row: Row, name: str) -> float:
    value = row.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _MOST_TIME:
        raise _Invalid(f"{name} must be a number from 0 to {_MOST_TIME:g}, got {value!r}")
    return float(value)


def _text(row: Row, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value:
        raise _Invalid(f"{name} must be a text, got {value!r}")
    value.encode()  # half a surrogate pair raises a ValueError
    return value
