"""Sizes, timing and planned faults of a mock engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from evolving.core.config import EvictionPolicy, FetchConfig, FetchStart
from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Faults that happen by themselves, for processes no test can reach into. The default has none."""

    crash_after_iterations: int = 0  # the engine dies after so many iterations of each life; 0: never
    crash_status: int = -9  # exit status then; negative: a signal
    stall_after_iterations: int = 0  # one pause after so many iterations; 0: never
    stall_s: float = 0.0  # its length, seconds
    transfer_delay_s: float = 0.0  # added to each page sent to another engine, seconds
    corrupt_every_pages: int = 0  # each so-manieth page sent has a flipped bit; 0: none


@dataclass(frozen=True, slots=True)
class MockConfig:
    """One mock engine. Sizes are multiples of `block_tokens`; out-of-range values raise ValueError."""

    node_id: str
    model: str = "mock"
    kv_revision: str = "mock-1"  # engines of another revision name their blocks otherwise and share nothing
    block_tokens: int = 64
    vocab_size: int = 32_000
    eos_token_id: int = 0
    max_prompt_tokens: int = 65_536
    max_context_tokens: int = 81_920
    l1_tokens: int = 262_144
    l2_tokens: int = 1_048_576
    decode_slots: int = 64  # most requests decoded or reserved at once
    chunk_tokens: int = 2_048  # prompt tokens computed per iteration at most
    bytes_per_token: int = 4  # KV bytes of one token; where they are real, small: only their identity matters
    # Real KV bytes, checked wherever they travel, and tokens drawn from them. False: none are made, stored or sent,
    # only names and the time they would take, and tokens come from names: for replays at the speed of real traces.
    verify_kv: bool = True
    tokens_per_iteration: int = 1  # t_acc of the paper (section 4.2): tokens accepted per decode iteration
    eviction: EvictionPolicy = EvictionPolicy.AGENT
    fetch_start: FetchStart = FetchStart.ENQUEUE
    fetch: FetchConfig = field(default_factory=FetchConfig)  # its bytes_per_s is multiplied by `speed_up`
    # Equations 1 and 2 of the paper, for a mid-sized model on one accelerator.
    prefill: PrefillCoefficients = field(default_factory=lambda: PrefillCoefficients(0.004, 4e-5, 2e-10, 4e-7, 0.0))
    decode: DecodeCoefficients = field(default_factory=lambda: DecodeCoefficients(0.008, 0.0, 1e-4, 2e-8))
    speed_up: float = 1.0  # modelled durations are divided by this; deadlines are not. inf: no time at all
    # Modelled on top of what the real socket takes, before `speed_up`.
    transfer_bytes_per_s: float = math.inf  # of one prompt, prefill to decode
    fetch_bytes_per_s: float = math.inf  # of one read of a peer's L2
    stalled_transport_s: float = 5.0  # a connection on which nothing came for so long is given up
    rendezvous_s: float = 1.0  # how long a decode leg may name a transfer its source doesn't know yet
    l2_survives_crash: bool = True
    host: str = "127.0.0.1"  # interface the transfer and pool server binds
    advertise_host: str = ""  # host others reach it by; empty: `host`
    faults: FaultPlan = FaultPlan()

    def __post_init__(self) -> None:
        if not self.node_id:
            raise ValueError("node_id must not be empty")
        counts = ("block_tokens", "vocab_size", "chunk_tokens", "decode_slots", "bytes_per_token", "l1_tokens")
        for name in (*counts, "tokens_per_iteration"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("speed_up", "transfer_bytes_per_s", "fetch_bytes_per_s", "stalled_transport_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 1 <= self.max_prompt_tokens < self.max_context_tokens or 2 * self.reserve_tokens > self.l1_tokens:
            raise ValueError(
                "need 1 <= max_prompt_tokens < max_context_tokens, and twice max_context_tokens within l1_tokens, so "
                "that one prefill and one decode always fit: got "
                f"{self.max_prompt_tokens}, {self.max_context_tokens}, {self.l1_tokens}"
            )
        if self.l1_tokens % self.block_tokens or self.l2_tokens % self.block_tokens:
            raise ValueError(f"l1_tokens and l2_tokens must be multiples of block_tokens ({self.block_tokens})")

    def pages(self, tokens: int) -> int:
        """Pages that the KV of a context takes."""
        return -(-tokens // self.block_tokens)

    @property
    def reserve_tokens(self) -> int:
        """L1 that legs of either kind leave alone: one context's worth."""
        return self.pages(self.max_context_tokens) * self.block_tokens

    @property
    def page_bytes(self) -> int:
        """Bytes of KV of one block."""
        return self.block_tokens * self.bytes_per_token

    @property
    def kv_format(self) -> str:
        """What two engines must agree on to exchange KV."""
        content = "" if self.verify_kv else "/names"
        return f"{self.model}/{self.kv_revision}/{self.block_tokens}x{self.bytes_per_token}{content}"
