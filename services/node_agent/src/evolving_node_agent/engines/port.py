"""The engine port: what a node agent asks of an engine, whichever it is.

One conformance suite (tests/engine) runs against every implementation. An engine runs both phases at once; a role
never reaches it. Token ids are numpy uint32 arrays, block names are the first 16 bytes of the chained digest
(`evolving.core.blocks`), digests are 32 bytes, durations are seconds.

A request has two legs. The *prefill leg* computes the prompt's KV and samples the first token; the *decode leg*
fetches that KV from the prefill leg (by `transfer_id`) and produces tokens from index 1 on. Both legs may run on one
node; then no bytes move.

A decode leg that ends before it is Reserved, however it does, leaves the prefill leg as it was: another one may come
for the same KV, here or elsewhere. From then until the KV has changed hands, the end of one leg ends the other.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from evolving.core import terms
from evolving.core.blocks import HashedTokens
from evolving.core.iterations import IterationWindow

Tier = terms.Tier
TokenIds = npt.NDArray[np.uint32]


class FinishReason(enum.StrEnum):
    """Why a generation ended."""

    STOP = "stop"  # a stop token or the model's end token
    LENGTH = "length"  # max_tokens, or the model's context, was reached
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. temperature 0 is greedy."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1  # -1: the whole vocabulary
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Holder:
    """A peer whose L2 holds blocks [first_block, first_block + blocks) of the prompt."""

    node_id: str
    pool_address: str  # host:port of the peer engine's pool, from its registration
    incarnation: str
    first_block: int
    blocks: int


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """One prefill leg."""

    leg_id: str  # unique per attempt
    transfer_id: int  # u64 that the decode leg names; unique per attempt
    tokens: TokenIds  # shape (prompt + generated,)
    generated: int  # how many ids at the end of `tokens` are output of an earlier attempt
    root: bytes  # 32 bytes: previous digest of block 0 (model, KV layout, tenant)
    sampling: Sampling
    priority: int = 0  # larger goes first among queued legs
    holders: tuple[Holder, ...] = ()
    fetch_deadline_s: float = 5.0  # how long the leg is held up for it at most; what has not come then is computed
    keep_s: float = 30.0  # how long computed KV is held while there is no decode leg for it
    blocks: HashedTokens | None = None  # the full blocks of `tokens`, where they are named already


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Prompt tokens not computed, by where they came from."""

    l1: int = 0
    l2: int = 0
    peer: int = 0

    @property
    def total(self) -> int:
        """All reused prompt tokens."""
        return self.l1 + self.l2 + self.peer

    @property
    def restored(self) -> int:
        """t_rst: those brought from host memory into device memory, a peer's by way of the node's own."""
        return self.l2 + self.peer


@dataclass(frozen=True, slots=True)
class Taken:
    """The leg left the queue; now, not before, a decode node is chosen for it."""

    queue_s: float
    fetch_s: float  # time in which blocks were read from peers
    hidden_s: float = 0.0  # of it, what passed while the leg could not have been taken anyway


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompt's KV is complete on this node and the first token is sampled."""

    first_token: int
    cached: CachedTokens
    prefill_s: float  # from Taken to here
    finish: FinishReason | None  # set when the first token is also the last: no decode leg is needed


@dataclass(frozen=True, slots=True)
class Sent:
    """The decode leg has all KV; the prefill leg is over and its pages are plain cache."""

    transfer_s: float
    bytes: int


PrefillEvent = Taken | Prefilled | Sent


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """One decode leg, pulling from the prefill leg `transfer_id` at `source_address`."""

    leg_id: str
    transfer_id: int
    tokens: TokenIds  # as in the prefill leg
    generated: int
    root: bytes
    sampling: Sampling
    source_node_id: str
    source_address: str  # EngineInfo.transfer_address of the prefill node
    reserve_deadline_s: float = 30.0  # no room by then: NoRoom
    blocks: HashedTokens | None = None  # as in the prefill leg


@dataclass(frozen=True, slots=True)
class Reserved:
    """Slots for the prompt are held on this node."""


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt's KV has landed here and decoding begins."""

    transfer_s: float
    cached_tokens: int  # of the prompt, already here, so not transferred
    first_token: int  # what the prefill leg sampled (index `generated`); names of output blocks need it here too


@dataclass(frozen=True, slots=True)
class Tokens:
    """The output ids of one decode iteration; `index` is the position of the first of them, counted from the first
    token of the request's output (the token the prefill leg sampled is index `generated`)."""

    index: int
    ids: TokenIds


@dataclass(frozen=True, slots=True)
class Finished:
    """The leg is over; its KV is plain cache from now on."""

    reason: FinishReason
    iterations: int  # decode iterations this request took part in


DecodeEvent = Reserved | Started | Tokens | Finished


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks became present in a tier, root-most first; each is the child of the one before it."""

    tier: Tier
    parent: bytes | None  # 16-byte name of the block before names[0]; None: names[0] is a context's first block
    names: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks left a tier, in any order."""

    tier: Tier
    names: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """A tier was emptied (an engine that crashed lost its L1, perhaps its L2)."""

    tier: Tier


KvEvent = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts fixed for one life of an engine process."""

    incarnation: str  # new at every start
    model: str
    kv_format: str  # model revision, dtype, layout: equal strings may exchange KV
    block_tokens: int
    vocab_size: int
    max_prompt_tokens: int  # a longer prompt is refused (the prefill reserve must hold one)
    max_context_tokens: int
    l1_tokens: int
    reserve_tokens: int  # of l1_tokens, what decodes leave to prefill, and prefills to decode
    l2_tokens: int
    decode_slots: int  # most requests decoded at once
    chunk_tokens: int
    kv_bytes_per_token: int  # all layers; tells what a fetch or a transfer moves
    transfer_address: str  # host:port decode legs elsewhere pull from
    pool_address: str  # host:port peers read this node's L2 through
    pid: int
    experts: int = 0  # E, routed experts of a layer; 0: a dense model
    experts_per_token: int = 0  # k


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A moment of the engine, pushed on change and at least once a second while it lives."""

    queued: Mapping[str, int] = field(default_factory=dict)  # prefill leg -> prompt tokens not yet known to be cached
    prefilling: Mapping[str, int] = field(default_factory=dict)  # prefill leg -> tokens left to compute
    holding: int = 0  # prefilled legs whose KV waits for a decode leg
    decoding: int = 0  # B
    decode_context_tokens: int = 0  # sum of context over the running batch
    reserved: int = 0  # decode legs that reserved and have not started
    reserved_context_tokens: int = 0  # sum of context over those
    l1_used_tokens: int = 0
    l2_used_tokens: int = 0
    iterations: int = 0  # all iterations since start
    prefill_iterations: int = 0  # those that computed prompt tokens
    prefill_tokens: int = 0  # prompt tokens computed since start, so that their ratio is the paper's mean u
    retractions: int = 0
    l2_zero_tokens: int = 0  # of l2_used_tokens, those whose block no branch counts here
    fetch_backlog_tokens: int = 0  # prompt tokens that legs not yet taken still have to get from peers
    fetching_blocks: int = 0  # host pages taken for reads that have not ended; 0 at rest
    fetched_tokens: int = 0  # tokens that came from peers since start
    fetch_busy_s: float = 0.0  # time in which at least one read from a peer was under way, since start
    ran: IterationWindow = field(default_factory=IterationWindow)  # iterations since start by kind, in wall time


class EngineError(Exception):
    """An engine could not do what was asked."""


class EngineDown(EngineError):
    """The engine process is not running (crashed, stopping or not yet ready)."""


class NoRoom(EngineError):
    """No slots or KV room within the deadline."""


class SourceLost(EngineError):
    """The prefill leg, or its node, went away before its KV was here."""


class DecodeLost(EngineError):
    """The decode leg that had reserved, or its node, went away; or there was none for `keep_s`."""


class Aborted(EngineError):
    """`abort` was called for this leg."""


class Rejected(EngineError):
    """The job itself is impossible here (too long, token out of vocabulary)."""


class Engine(Protocol):
    """One engine. All methods run on one event loop; none blocks it.

    Closing the iterator of `prefill` or `decode` (cancellation, `aclose`) aborts that leg within one iteration.
    """

    async def start(self) -> EngineInfo:
        """Start the engine and wait until it can serve. Raises EngineError with the tail of its log."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Stop taking legs, give running ones `grace_s`, then end the process and every child of it."""
        ...

    async def exited(self) -> int:
        """Wait until the engine process is gone without `stop`; its exit status (negative: signal)."""
        ...

    def prefill(self, job: PrefillJob) -> AsyncIterator[PrefillEvent]:
        """Taken, Prefilled, then Sent (or nothing more when `finish` is set). Raises EngineError subclasses."""
        ...

    def decode(self, job: DecodeJob) -> AsyncIterator[DecodeEvent]:
        """Reserved, Started, Tokens…, Finished. Raises EngineError subclasses."""
        ...

    async def abort(self, leg_id: str) -> bool:
        """End a leg of either phase in any stage; False: no such leg (not an error)."""
        ...

    def status(self) -> EngineStatus:
        """The newest status."""
        ...

    def status_changes(self) -> AsyncIterator[EngineStatus]:
        """Each new status; a slow reader sees only the newest."""
        ...

    def kv_events(self) -> AsyncIterator[Sequence[KvEvent]]:
        """Ordered, gapless. The first batch of an incarnation says everything the engine already holds."""
        ...

    async def set_needs(self, needs: Mapping[bytes, int]) -> None:
        """How much blocks on this node are needed (`evolving.core.needs`; 0 forgets one): eviction goes by that first,
        then by last access (the paper, section 4.4)."""
        ...

    async def needs(self) -> Mapping[bytes, int]:
        """The nonzero needs eviction goes by now, for audits."""
        ...

    async def free_l1(self) -> int:
        """Drop from L1 the blocks that L2 has too: now where no leg uses them, else when their last leg ends. L2 stays.

        Called when the node's role went from DECODE to PREFILL. Returns the blocks dropped at once.
        """
        ...

    async def clear(self) -> int:
        """Drop all blocks from both tiers: now where no leg uses them, else when their last leg ends.

        Called when the node's role went from DECODE to PREFILL and the cluster keeps the paper's rule (section 4.1).
        Returns the blocks dropped at once.
        """
        ...

    async def block_digests(self, names: Sequence[bytes], tier: Tier) -> Mapping[bytes, bytes]:
        """SHA-256 over the KV bytes (layers in order; per layer K then V, token-major) of blocks held in a tier."""
        ...
