"""Settings of one engine process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from evolving.core.config import EvictionPolicy, FetchConfig, FetchStart
from evolving.runtime.settings import is_loopback, join_address

_ROUNDING_BLOCKS = 2  # a prompt's partly filled last block, and the block its first output token may open


def refuse_strangers(host: str, secret: bytes) -> None:
    """Raises ValueError when other machines could reach transport tcp on `host` and there is no secret to ask for."""
    if not secret and not is_loopback(join_address(host, 0)):
        raise ValueError(
            f"transport tcp on {host} would let every machine read this node's KV: give the cluster's token "
            "(--token-file), or listen on 127.0.0.1 (--engine-host)"
        )


@dataclass(frozen=True, slots=True)
class SglangConfig:
    """What an engine process is started with. Defaults suit a small model on CPU.

    One KV pool (L1) serves both phases. `max_prompt_tokens` of it are kept free for prefill and as many for decode,
    so two nodes that hand requests to each other never wait on each other for memory; hence the lower limit on
    `l1_tokens`.
    """

    model_path: str  # a directory with safetensors, config and tokenizer
    model_name: str = ""  # what nodes of one cluster call it; "" takes the directory's name
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"  # of weights and KV
    block_tokens: int = 64  # page size of both tiers
    l1_tokens: int = 8192  # KV capacity in device memory
    l2_tokens: int = 32768  # KV capacity in host memory; at least twice `l1_tokens`, half of it for what L1 has too
    chunk_tokens: int = 512  # most prompt tokens computed between two decode iterations
    max_prompt_tokens: int = 0  # 0: the most `l1_tokens` allows
    decode_slots: int = 16  # most requests decoded at once
    prefill_slots: int = 16  # most requests computing, or computed and waiting for their decode leg
    bind_host: str = "127.0.0.1"  # interface the peer service listens on
    advertise_host: str = ""  # address peers reach this node at; "" takes `bind_host`
    port: int = 0  # of the peer service; 0 takes a free one
    # How KV travels, the same on all nodes. tcp: ours, authenticated, host memory only, on the port after `port`.
    transport: Literal["mooncake-tcp", "mooncake-rdma", "tcp"] = "mooncake-tcp"
    rdma_device: str = ""  # device names for mooncake-rdma, comma separated
    eviction: EvictionPolicy = EvictionPolicy.AGENT  # what leaves memory first
    fetch_start: FetchStart = FetchStart.ENQUEUE  # when blocks are fetched from peers
    fetch: FetchConfig = field(default_factory=FetchConfig)  # bounds of reads from peers
    page_checksums: bool = True  # host pages carry a checksum that peers verify; costs a pass over each page
    start_timeout_s: float = 300.0  # from spawn to serving
    log_path: str = ""  # the process's output; "" takes a temporary file
    extra_flags: tuple[str, ...] = ()  # appended to SGLang's own command line, so they win

    def __post_init__(self) -> None:
        if not self.model_path:
            raise ValueError("model_path is empty")
        for name in ("block_tokens", "l1_tokens", "l2_tokens", "chunk_tokens", "decode_slots", "prefill_slots"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("l1_tokens", "l2_tokens", "chunk_tokens"):
            if getattr(self, name) % self.block_tokens:
                raise ValueError(f"{name} must be a multiple of block_tokens ({self.block_tokens})")
        if self.l2_tokens < 2 * self.l1_tokens:
            raise ValueError(
                f"l2_tokens ({self.l2_tokens}) must be at least twice l1_tokens ({self.l1_tokens}): what is in L1 "
                "keeps its copy in L2, and in a smaller L2 those copies leave no room for what peers send or L1 lets go"
            )
        if not 0 <= self.max_prompt_tokens <= self.largest_prompt_tokens:
            raise ValueError(
                f"max_prompt_tokens must be between 0 and {self.largest_prompt_tokens}, half of l1_tokens less "
                f"{_ROUNDING_BLOCKS} blocks, got {self.max_prompt_tokens}"
            )
        if self.largest_prompt_tokens < self.block_tokens:
            raise ValueError(f"l1_tokens ({self.l1_tokens}) is too small for prompts of a block")

    @property
    def largest_prompt_tokens(self) -> int:
        """The longest prompt both reserves have room for."""
        half_blocks = self.l1_tokens // self.block_tokens // 2
        return (half_blocks - _ROUNDING_BLOCKS) * self.block_tokens

    @property
    def prompt_limit_tokens(self) -> int:
        """The longest prompt this engine takes."""
        return self.max_prompt_tokens or self.largest_prompt_tokens

    @property
    def reserve_tokens(self) -> int:
        """KV kept for each phase from the other: one prompt of the longest kind, and its rounding."""
        return self.prompt_limit_tokens + _ROUNDING_BLOCKS * self.block_tokens

    @property
    def peer_host(self) -> str:
        """The address peers reach this node at."""
        return self.advertise_host or self.bind_host
