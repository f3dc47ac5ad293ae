"""A trace as paths through a tree of blocks: what every request looks up, stores, and changes of its branch.

A node of the tree is a block with all the blocks before it, as KV is. Nodes are numbered from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evolving_sim.interleaving import Kind, Moment, interleave
from evolving_sim.traces import BlockIds, TraceRequest, TraceSession, shared_blocks, sharing_memory

Nodes = npt.NDArray[np.uint32]
_NONE = np.zeros(0, np.uint32)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One thing that happens to the pool: a prompt, an answer that ended, or a branch that ended."""

    path: Nodes  # what is looked up and stored, root first; empty at a branch's end
    is_prompt: bool  # looked up, not only stored
    prompt_tokens: int  # of a prompt, else 0
    reusable_blocks: int  # at most so many of the path: the last token of a prompt is always computed
    dropped: Nodes  # end of the branch's context that it no longer has, root first
    added: Nodes  # what comes instead, root first


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """What `oracle.simulate` plays."""

    block_tokens: int
    nodes: int
    depth: npt.NDArray[np.int32]  # of each node; a root's is 0. Shape: (nodes,)
    steps: Sequence[Step]
    # Most distinct blocks that live branches counted at a moment: the peak active working set of one pool.
    peak_counted_blocks: int


def make_workload(
    sessions: Sequence[TraceSession], concurrency: int, stagger_s: float = 0.0, outputs_return: bool = True
) -> Workload:
    """Interleave sessions, so many at a time (`interleave`), and number their blocks.

    A branch counts its last prompt and what the answer added. `outputs_return` says whether a prompt that extends the
    last one contains its answer; otherwise an answer's blocks are never asked for again, and not stored here.
    All sessions must have one block size.
    """
    sizes = {session.block_tokens for session in sessions}
    if len(sizes) != 1:
        raise ValueError(f"sessions must have one block size, got {sorted(sizes)}")
    block_tokens = sizes.pop()
    tree = _Tree()
    paths = [tree.paths(session) for session in sessions]
    steps: list[Step] = []
    contexts: dict[tuple[int, int], Nodes] = {}
    for moment in interleave(sessions, concurrency, stagger_s):
        if moment.kind is Kind.SESSION_ENDS:
            for agent in range(len(sessions[moment.session].agents)):
                ended = contexts.pop((moment.session, agent))
                steps.append(Step(_NONE, False, 0, 0, dropped=ended, added=_NONE))
            continue
        requests = sessions[moment.session].agents[moment.agent].requests
        step = _step(moment, requests, paths[moment.session][moment.agent], block_tokens, outputs_return)
        if step is None:
            continue
        path, prompt = step
        before = contexts.get((moment.session, moment.agent), _NONE)
        contexts[moment.session, moment.agent] = path
        shared = shared_blocks(before, path)
        tokens = prompt.input_tokens if prompt else 0
        reusable = max(0, tokens - 1) // block_tokens
        steps.append(Step(path, prompt is not None, tokens, reusable, before[shared:], path[shared:]))
    depth = np.array(tree.depth, np.int32)
    return Workload(block_tokens, len(depth), depth, steps, _peak(steps, len(depth)))


def _step(
    moment: Moment, requests: Sequence[TraceRequest], paths: Sequence[Nodes], block_tokens: int, outputs_return: bool
) -> tuple[Nodes, TraceRequest | None] | None:
    """The path of a moment, with its request when it is a prompt; None: an answer of which nothing is kept."""
    request, path = requests[moment.request], paths[moment.request]
    if moment.kind is Kind.REQUEST_BEGINS:
        return path, request
    if not outputs_return or moment.request + 1 == len(paths):
        return None
    following = paths[moment.request + 1]
    # The last token sampled has no KV yet.
    kept = min((request.input_tokens + request.output_tokens - 1) // block_tokens, len(following))
    if kept <= len(path) or shared_blocks(path, following) < len(path):
        return None
    return following[:kept], None


def _peak(steps: Sequence[Step], nodes: int) -> int:
    counts = np.zeros(nodes, np.int32)
    counted = peak = 0
    for step in steps:
        counts[step.dropped] -= 1
        counted -= int(np.count_nonzero(counts[step.dropped] == 0))
        counted += int(np.count_nonzero(counts[step.added] == 0))
        counts[step.added] += 1
        peak = max(peak, counted)
    assert counted == 0, "every session ends its branches"
    return peak


class _Tree:
    """Numbers blocks by the path that leads to them."""

    def __init__(self) -> None:
        self.depth: list[int] = []
        self._shared: dict[int, int] = {}  # of sessions whose ids mean the same

    def paths(self, session: TraceSession) -> list[list[Nodes]]:
        """The path of every prompt of every agent."""
        children = self._shared if session.ids_shared else {}
        return [self._agent_paths([r.block_ids for r in agent.requests], children) for agent in session.agents]

    def _agent_paths(self, prompts: Sequence[BlockIds], children: dict[int, int]) -> list[Nodes]:
        paths: list[Nodes] = []
        last_ids, last_path = _NONE, _NONE
        for ids in prompts:
            shared = shared_blocks(last_ids, ids)
            path = np.empty(len(ids), np.uint32)
            path[:shared] = last_path[:shared]
            at = int(path[shared - 1]) + 1 if shared else 0
            for index, block_id in enumerate(ids[shared:].tolist(), shared):
                key = at << 32 | block_id
                node = children.get(key)
                if node is None:
                    node = children[key] = len(self.depth)
                    self.depth.append(index)
                path[index] = node
                at = node + 1
            paths.append(path)
            last_ids, last_path = ids, path
        return sharing_memory(paths)
