"""What a simulated node is: its speed, its sizes, its links."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients


class BothPhases(enum.StrEnum):
    """How an engine that has prompts to compute and requests to decode does both."""

    ALTERNATE = "alternate"  # an iteration that decodes, then one that computes: T_D + T_P
    TOGETHER = "together"  # both in one forward pass: T_P + T_D − d0 (DESIGN's mixed iteration)


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """One node. Out-of-range values raise ValueError."""

    prefill: PrefillCoefficients  # equation 1
    decode: DecodeCoefficients  # equation 2
    # t_fwd: tokens a request feeds per decode iteration; above 1 with speculation (§4.2).
    tokens_per_request: float = 1.0
    # t_acc: tokens a decode iteration gives a request, mean (§4.2).
    accepted_tokens: float = 1.0
    # Most new tokens of one prefill iteration.
    chunk_tokens: int = 16_384
    # Most requests decoded at once.
    decode_slots: int = 64
    # Tokens in a block of KV (§4.1).
    block_tokens: int = 64
    # Tokens of KV in device memory.
    l1_tokens: int = 5_000_000
    # Tokens of KV in host memory, each once (§4.1: 20 million on a node of the paper).
    l2_tokens: int = 20_000_000
    # Longest context; as much device memory prompts and answers each leave to the other.
    context_tokens_max: int = 400_000
    # Bytes of KV of one token, all layers.
    kv_bytes_per_token: float = 50e3
    # Bytes/s that reads from peers' host memory bring to one node.
    fetch_bytes_per_s: float = 1e11
    # Bytes/s that peers can read from one node's host memory.
    serve_bytes_per_s: float = 1e11
    # Seconds a fetch takes before its first byte.
    fetch_fixed_s: float = 0.001
    # Bytes/s from one node's device memory to others', and as many into it.
    transfer_bytes_per_s: float = 2e11
    # Seconds a transfer takes before its first byte.
    transfer_fixed_s: float = 0.002
    both_phases: BothPhases = BothPhases.ALTERNATE

    def __post_init__(self) -> None:
        for name in ("tokens_per_request", "accepted_tokens", "chunk_tokens", "decode_slots", "block_tokens"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 1):
                raise ValueError(f"{name} must be finite and at least 1, got {getattr(self, name)}")
        bandwidths = ("fetch_bytes_per_s", "serve_bytes_per_s", "transfer_bytes_per_s")
        for name in ("l1_tokens", "l2_tokens", "context_tokens_max", "kv_bytes_per_token", *bandwidths):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("fetch_fixed_s", "transfer_fixed_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, got {getattr(self, name)}")

    @property
    def fetch_tokens_per_s(self) -> float:
        """Tokens of KV that reads from peers bring."""
        return self.fetch_bytes_per_s / self.kv_bytes_per_token

    def decode_iterations(self, output_tokens: int) -> int:
        """n_it = (t_out − 1)/t_acc, rounded up: prefill gives the first token."""
        return math.ceil((output_tokens - 1) / self.accepted_tokens)

    @property
    def reserve_tokens(self) -> int:
        """Device memory that prompts and answers each leave to the other: a context's worth, half of it at most."""
        return min(self.context_tokens_max, self.l1_tokens // 2)
