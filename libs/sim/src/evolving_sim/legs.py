"""A request on its way through a simulated cluster, and its legs: its parts on one node each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from evolving.core.directory_types import Match
from evolving.core.holders import HeldRun, HolderHint
from evolving.core.work import query_key_pairs
from evolving_sim.kv import LegKv
from evolving_sim.links import Transfer


@dataclass(slots=True, eq=False)
class Request:
    """What was asked, and what happened to it."""

    request_id: str  # unique in a run
    kind: str  # what results are told apart by
    agent_id: str  # whom sticky routing goes by: the main agent's branch, also for its sub-agents
    branch_id: str
    parent_branch_id: str  # "": a root
    version: int  # of the branch, from 1; grows with each rewrite
    # 16-byte names of the full blocks of prompt and answer, (prompt_tokens + output_tokens - 1) // block_tokens or
    # more; equal exactly where contexts are.
    names: Sequence[bytes]
    shared_blocks: int  # leading ones in common with the branch's last context, answer included; 0: a new branch
    prompt_tokens: int
    output_tokens: int
    sent_s: float
    on_done: Callable[[], None]
    # Set as it goes; of several attempts, the last one's.
    taken_s: float = math.nan  # left the queue of its prefill node
    first_token_s: float = math.nan
    done_s: float = math.nan
    cached_tokens: int = 0  # of the prompt, reused
    ideal_tokens: int = 0  # of the prompt, whose KV some earlier request produced
    fetched_tokens: int = 0  # of the cached ones, brought from peers for this request
    prefill_node: str = ""
    decode_node: str = ""
    generated_tokens: int = 0  # when its present attempt began: those of attempts that lost their node

    @property
    def context_tokens(self) -> int:
        """What its present attempt has to prefill."""
        return self.prompt_tokens + self.generated_tokens


@dataclass(slots=True, eq=False)
class PrefillLeg:
    """A prompt on the node that computes it."""

    request: Request
    number: int  # in order of being sent
    node_id: str
    context_tokens: int  # prompt, and output of earlier attempts
    match: Match  # where its blocks lay, by the directory, when it was sent
    runs: Sequence[HeldRun]  # of them, whom peers can read from
    kv: LegKv
    # What it reuses: reckoned with while it waits, as it is once it is taken.
    cached_tokens: int
    restored_tokens: int
    hints: Sequence[HolderHint] = ()  # whom it fetches from
    fetch_until_blocks: int = 0  # leading blocks it will have once that is over
    awaits_room: bool = False  # on its decode node, without which it isn't computed
    fetch_begun: bool = False
    fetch_over: bool = True  # nothing is still to come
    fetch_from_blocks: int = 0  # those it has now
    coming_tokens: int = 0  # still to come from peers
    transfer: Transfer | None = None  # that brings some of them
    fetched_blocks: int = 0
    kept_blocks: int = 0  # leading ones kept in host memory while it waits
    computed_tokens: int = 0
    prefilled: bool = False  # its first token is there
    gone: bool = False  # it left its node

    @property
    def uncached_tokens(self) -> int:
        """t_uc."""
        return self.context_tokens - self.cached_tokens

    @property
    def left_tokens(self) -> int:
        """Still to compute."""
        return self.context_tokens - self.cached_tokens - self.computed_tokens

    @property
    def query_key_pairs(self) -> float:
        """A of all it computes."""
        return query_key_pairs(self.uncached_tokens, self.cached_tokens)


@dataclass(slots=True, eq=False)
class DecodeLeg:
    """An answer on the node that decodes it."""

    request: Request
    prefill: PrefillLeg  # whose KV it gets
    iterations: int  # n_it
    growth_tokens: float  # t_acc
    node_id: str = ""  # once one is chosen
    kv: LegKv = field(init=False)  # likewise
    stored_tokens: int = 0  # what the node's host memory lacked when it was chosen
    granted: bool = False  # it has a slot and room
    joined_iteration: int = -1  # of its node, its first; -1: it does not decode yet
    gone: bool = False  # it left its node

    @property
    def prefilled(self) -> bool:
        """Its first token is there."""
        return self.prefill.prefilled

    @property
    def context_tokens(self) -> int:
        """Of its first iteration: the token that prefill gave is fed."""
        return self.prefill.context_tokens + 1

    @property
    def end_iteration(self) -> int:
        """Of its node, after its last."""
        return self.joined_iteration + self.iterations

    @property
    def mean_context_tokens(self) -> float:
        """Over its iterations."""
        return self.context_tokens + self.growth_tokens * (self.iterations - 1) / 2
