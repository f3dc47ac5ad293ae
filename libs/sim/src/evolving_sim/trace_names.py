"""Names of the blocks of recorded prompts and their answers: equal exactly where a replay's token ids are.

A trace has block ids only. What stands for an id that comes for the first time is as in `evolving_replay.prompts`:
where the prompt goes on from an earlier one of its session, that one's tail and answer come first, and only the rest is
made up. So a prompt that extends the last one holds its answer, as far as it is long enough. Here nobody makes tokens:
a stretch of them is told by whose it is and where it begins and ends.
"""

from __future__ import annotations

import heapq
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from evolving.core.terms import NAME_BYTES
from evolving_sim.traces import BlockIds, TraceRequest, TraceSession, branch_steps

# Some tokens: whose (a block id; or the tail or the answer of a request), from which of them on, how many.
Stretch = tuple[int, int, int]
Stretches = tuple[Stretch, ...]

_TAILS = 1 << 32  # block ids are below; then the tails of requests, by number
_ANSWERS = 1 << 33
_NO_BLOCK = -1
_pack = struct.Struct("<QII").pack


@dataclass(frozen=True, slots=True, eq=False)
class NamedRequest:
    """A request of a trace as its branch sees it, with the names of what it leaves."""

    version: int
    # Of the full blocks of prompt and answer that have KV, and perhaps more behind them: see contexts.BlockNames.
    names: Sequence[bytes]
    blocks: int  # those that have KV once it is answered
    shared_blocks: int  # leading ones that the agent's last request left too


@dataclass(slots=True, eq=False, repr=False)
class BlockContents:
    """What block ids stand for: of one session, or of all where the trace shares ids. `scope` tells it from others.

    Raises ValueError where neither of the trace's and the cluster's blocks is whole ones of the other.
    """

    scope: str
    trace_block_tokens: int
    block_tokens: int
    requests: int = field(init=False, default=0)  # so far, those of all sessions
    root: bytes = field(init=False)
    known: dict[int, Stretches] = field(init=False, default_factory=dict)  # (): made up, all of it

    def __post_init__(self) -> None:
        if self.trace_block_tokens % self.block_tokens and self.block_tokens % self.trace_block_tokens:
            raise ValueError(
                f"the trace has blocks of {self.trace_block_tokens} tokens: block_tokens must divide them or be a "
                f"multiple, {self.block_tokens} is neither"
            )
        self.root = blake2b(self.scope.encode(), digest_size=NAME_BYTES).digest()


def recorded_output(request: TraceRequest) -> int:
    """Tokens of an answer: prefill gives one at least."""
    return max(1, request.output_tokens)


def name_session(
    session: TraceSession, contents: BlockContents, output_tokens: Callable[[TraceRequest], int] = recorded_output
) -> list[list[NamedRequest]]:
    """All requests of a session, by agent; those of different agents one after the other, as they were recorded.

    output_tokens: of the answer; of one that is longer than recorded, prompts that go on from it hold only so much.
    """
    # By the last full block of an earlier prompt: what came after it, the tail and then the answer.
    said_after: dict[int, Stretches] = {}
    agents = [_Agent(contents, said_after) for _ in session.agents]
    named: list[list[NamedRequest]] = [[] for _ in agents]
    steps = [branch_steps(agent.requests) for agent in session.agents]
    first = contents.requests
    before = [0]
    for agent in session.agents:
        before.append(before[-1] + len(agent.requests))
    for _, number, index, request in heapq.merge(*_recorded(session), key=lambda each: each[:3]):
        step = next(steps[number])
        left = agents[number].ask(request, step.shared_blocks, first + before[number] + index, output_tokens(request))
        named[number].append(NamedRequest(step.version, *left))
    contents.requests += before[-1]
    return named


def _recorded(session: TraceSession) -> Iterator[list[tuple[float, int, int, TraceRequest]]]:
    for number, agent in enumerate(session.agents):
        latest_s, rows = 0.0, []
        for index, request in enumerate(agent.requests):
            latest_s = max(latest_s, request.at_s)  # an agent's requests stay in their order
            rows.append((latest_s, number, index, request))
        yield rows


@dataclass(slots=True, eq=False, repr=False)
class _Agent:
    """One context as it is rewritten and grows."""

    contents: BlockContents
    said_after: dict[int, Stretches]
    names: list[bytes] = field(init=False, default_factory=list)

    def ask(
        self, request: TraceRequest, shared_ids: int, number: int, output_tokens: int
    ) -> tuple[list[bytes], int, int]:
        """Names, how many of them have KV, and how many of those the last request left too.

        shared_ids: leading block ids in common with the agent's last prompt.
        """
        tail = self._read(request, shared_ids, number)
        returned_tokens = min(output_tokens, recorded_output(request))
        self.said_after[_last(request.block_ids)] = (*tail, (_ANSWERS + number, 0, returned_tokens))
        after = (*tail, (_ANSWERS + number, 0, output_tokens))
        size, whole = self.contents.block_tokens, self.contents.trace_block_tokens
        blocks = (request.input_tokens + output_tokens - 1) // size
        start = shared_ids * whole // size
        rest = self.names[start:]  # of the last context; this one may go on with some of it
        new: list[bytes] = []
        name = self.names[start - 1] if start else self.contents.root
        for key in self._block_keys(request.block_ids[start * size // whole :].tolist(), after, blocks - start):
            name = blake2b(name + key, digest_size=NAME_BYTES).digest()
            new.append(name)
        common = next((at for at, (one, two) in enumerate(zip(rest, new, strict=False)) if one != two), None)
        common = min(len(rest), len(new)) if common is None else common
        shared = start + common
        if common < len(rest):
            self.names = self.names[:shared]
        self.names += new[common:]
        return self.names, blocks, shared

    def _block_keys(self, ids: Sequence[int], after: Stretches, blocks: int) -> Iterable[bytes]:
        """What the tokens are of each of so many blocks: those of some ids, and after them."""
        known, size, whole = self.contents.known, self.contents.block_tokens, self.contents.trace_block_tokens
        if size == whole:
            keys = [_key(known[block_id]) if known[block_id] else _pack(block_id, 0, whole) for block_id in ids]
            return (*keys, *_keys(after, size, blocks - len(ids)))
        tokens = (known[block_id] or ((block_id, 0, whole),) for block_id in ids)
        return _keys(itertools.chain(itertools.chain.from_iterable(tokens), after), size, blocks)

    def _read(self, request: TraceRequest, shared_ids: int, number: int) -> Stretches:
        """Learn the ids that are new in a prompt. Returns what follows its last full block."""
        known, size = self.contents.known, self.contents.trace_block_tokens
        ids: list[int] = request.block_ids[shared_ids:].tolist()
        old = next((at for at, block_id in enumerate(ids) if block_id not in known), len(ids))
        before = _last(request.block_ids[: shared_ids + old])
        new_tokens = request.input_tokens - (shared_ids + old) * size
        said = _cut(self.said_after.get(before, ()), 0, new_tokens)
        said_tokens = sum(count for _, _, count in said)
        for at, block_id in enumerate(ids[old:]):
            if at * size >= said_tokens:
                known.setdefault(block_id, ())
            else:
                known.setdefault(block_id, _filled(_cut(said, at * size, (at + 1) * size), block_id, size))
        tail_from = (len(ids) - old) * size
        return _filled(_cut(said, tail_from, new_tokens), _TAILS + number, new_tokens - tail_from)


def _keys(tokens: Iterable[Stretch], size: int, blocks: int) -> Iterator[bytes]:
    """Of the first blocks of so many tokens each. Stretches that go on from one another are as one, cut or not."""
    block: list[Stretch] = []
    room = size
    for whose, start, count in tokens:
        first, left = start, count
        while left and blocks > 0:
            taken = min(room, left)
            if block and block[-1][0] == whose and block[-1][1] + block[-1][2] == first:
                block[-1] = (whose, block[-1][1], block[-1][2] + taken)
            else:
                block.append((whose, first, taken))
            first, left, room = first + taken, left - taken, room - taken
            if room == 0:
                yield _key(block)
                block, room, blocks = [], size, blocks - 1


def _key(tokens: Iterable[Stretch]) -> bytes:
    return b"".join([_pack(*stretch) for stretch in tokens])


def _cut(tokens: Stretches, start: int, end: int) -> Stretches:
    """Those from `start` to before `end`, as far as there are."""
    cut, at = [], 0
    for whose, first, count in tokens:
        low, high = max(start - at, 0), min(end - at, count)
        if low < high:
            cut.append((whose, first + low, high - low))
        at += count
    return tuple(cut)


def _filled(tokens: Stretches, whose: int, count: int) -> Stretches:
    """These, and then as many of another's as `count` in all takes."""
    there = sum(each for _, _, each in tokens)
    return (*tokens, (whose, there, count - there)) if there < count else tokens


def _last(ids: BlockIds) -> int:
    return int(ids[-1]) if len(ids) else _NO_BLOCK
