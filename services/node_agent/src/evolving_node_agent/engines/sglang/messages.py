"""What the adapter and the engine process say to each other: msgpack frames on one socket.

Token ids are little-endian u32 bytes; block names are 16 bytes, concatenated where there are many.
"""

from __future__ import annotations

import msgspec

from evolving_node_agent.engines.port import CachedTokens, EngineInfo, EngineStatus, FinishReason, Holder, Sampling


class Prefill(msgspec.Struct, tag=True, frozen=True):
    """Start a prefill leg: `PrefillJob` in bytes."""

    leg_id: str
    transfer_id: int
    tokens: bytes
    generated: int
    root: bytes
    sampling: Sampling
    priority: int
    holders: tuple[Holder, ...]
    fetch_deadline_s: float
    keep_s: float


class Decode(msgspec.Struct, tag=True, frozen=True):
    """Start a decode leg: `DecodeJob` in bytes."""

    leg_id: str
    transfer_id: int
    tokens: bytes
    generated: int
    root: bytes
    sampling: Sampling
    source_node_id: str
    source_address: str
    reserve_deadline_s: float


class Abort(msgspec.Struct, tag=True, frozen=True):
    """End a leg; answered with `Answer.found`."""

    request: int
    leg_id: str


class SetNeeds(msgspec.Struct, tag=True, frozen=True):
    """Change what eviction goes by; answered, so that a reader of it sees that."""

    request: int
    needs: dict[bytes, int]


class AskNeeds(msgspec.Struct, tag=True, frozen=True):
    """Ask for what eviction goes by."""

    request: int


class Drop(msgspec.Struct, tag=True, frozen=True):
    """Drop from L1 what L2 has too, or everything from both; answered with `Answer.blocks`."""

    request: int
    l2: bool


class AskDigests(msgspec.Struct, tag=True, frozen=True):
    """Ask for KV digests of blocks in a tier."""

    request: int
    names: bytes
    tier: int


class Drain(msgspec.Struct, tag=True, frozen=True):
    """Take no more legs; exit when the last one has ended."""


Command = Prefill | Decode | Abort | SetNeeds | AskNeeds | AskDigests | Drop | Drain


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine serves."""

    info: EngineInfo


class LegTaken(msgspec.Struct, tag=True, frozen=True):
    """`Taken` of a leg."""

    leg_id: str
    queue_s: float
    fetch_s: float
    hidden_s: float


class LegPrefilled(msgspec.Struct, tag=True, frozen=True):
    """`Prefilled` of a leg."""

    leg_id: str
    first_token: int
    cached: CachedTokens
    prefill_s: float
    finish: FinishReason | None


class LegSent(msgspec.Struct, tag=True, frozen=True):
    """`Sent` of a leg."""

    leg_id: str
    transfer_s: float
    bytes: int


class LegReserved(msgspec.Struct, tag=True, frozen=True):
    """`Reserved` of a leg."""

    leg_id: str


class LegStarted(msgspec.Struct, tag=True, frozen=True):
    """`Started` of a leg."""

    leg_id: str
    transfer_s: float
    cached_tokens: int
    first_token: int


class LegTokens(msgspec.Struct, tag=True, frozen=True):
    """`Tokens` of a leg."""

    leg_id: str
    index: int
    ids: bytes


class LegFinished(msgspec.Struct, tag=True, frozen=True):
    """`Finished` of a leg."""

    leg_id: str
    reason: FinishReason
    iterations: int


class LegFailed(msgspec.Struct, tag=True, frozen=True):
    """The leg ended with an error of the port, by class name."""

    leg_id: str
    error: str
    message: str


class StatusChanged(msgspec.Struct, tag=True, frozen=True):
    """The newest status."""

    status: EngineStatus


class BlocksStored(msgspec.Struct, tag=True, frozen=True):
    """`Stored`."""

    tier: int
    parent: bytes | None
    names: bytes


class BlocksRemoved(msgspec.Struct, tag=True, frozen=True):
    """`Removed`."""

    tier: int
    names: bytes


class TierCleared(msgspec.Struct, tag=True, frozen=True):
    """`Cleared`."""

    tier: int


class KvChanged(msgspec.Struct, tag=True, frozen=True):
    """Changes of what the node holds, in order."""

    events: tuple[BlocksStored | BlocksRemoved | TierCleared, ...]


class Answer(msgspec.Struct, tag=True, frozen=True):
    """The answer to a question with this request number."""

    request: int
    found: bool = True
    blocks: int = 0
    needs: dict[bytes, int] = {}
    digests: dict[bytes, bytes] = {}


LegMessage = LegTaken | LegPrefilled | LegSent | LegReserved | LegStarted | LegTokens | LegFinished | LegFailed
Report = Ready | LegMessage | StatusChanged | KvChanged | Answer
