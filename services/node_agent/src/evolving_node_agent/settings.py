"""Settings of the node agent."""

from __future__ import annotations

import math
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from evolving.core.config import EvictionPolicy, FetchConfig, FetchStart
from evolving.runtime.settings import ServiceSettings


class NodeAgentSettings(ServiceSettings):
    """One engine and its node in the cluster. Sizes of 0 take the engine's own default."""

    service: ClassVar[str] = "node_agent"

    node_id: str = Field(..., pattern=r"^[A-Za-z0-9._-]+$", description="this node's name, unique in the partition")
    max_queued_legs: int = Field(
        256, ge=1, description="prefill legs that may wait; more are answered RESOURCE_EXHAUSTED with a retry hint"
    )
    fetch_deadline_s: float = Field(
        5.0, gt=0, description="longest a prefill is held up for KV from peers; what has not come is computed, seconds"
    )
    fetch_start: FetchStart = Field(
        FetchStart.ENQUEUE,
        description="when KV is fetched from peers: enqueue, while the request waits; admission, once its turn has "
        "come, with those behind it waiting too, for comparison",
    )
    fetch_readers: int = Field(4, ge=1, le=64, description="reads from peers at once")
    fetch_bytes_per_s: float = Field(
        0.0, ge=0, description="what all reads from peers may bring, bytes a second; 0: no limit"
    )
    eviction: EvictionPolicy = Field(
        EvictionPolicy.AGENT,
        description="what is evicted first: agent, the least needed by branches, then the longest unused; lru, the "
        "longest unused, for comparison",
    )
    keep_s: float = Field(30.0, gt=0, description="how long computed KV waits for a decode leg, seconds")
    reserve_deadline_s: float = Field(
        30.0, gt=0, description="longest wait for decode room where the call names none, seconds"
    )
    prefill_coefficients: tuple[float, ...] = Field(
        (),
        description="c0,c1,c2,c3,c4 of equation 1: seconds per iteration, uncached token, query-key pair, restored "
        "token, cached token; empty: the engine's own",
    )
    decode_coefficients: tuple[float, ...] = Field(
        (),
        description="d0,d1,d2,d3 of equation 2: seconds per iteration, all experts, request, context token; empty: "
        "the engine's own",
    )
    restart_first_s: float = Field(0.5, gt=0, description="wait before the first restart of an engine, seconds")
    restart_max_s: float = Field(30.0, gt=0, description="longest wait before a restart; each doubles, seconds")
    restart_attempts: int = Field(
        5, ge=1, description="starts that may fail within restart_window_s; then the agent gives up and exits"
    )
    restart_window_s: float = Field(300.0, gt=0, description="see restart_attempts, seconds")
    unsent_reports: int = Field(
        10_000,
        ge=1,
        description="reports kept while the directory is away, and samples of work and windows of iterations, "
        "each, while the planner is; the oldest go first",
    )
    work_period_s: float = Field(1.0, gt=0, description="time between reports to the planner, seconds")
    iteration_window_s: float = Field(
        1.0, gt=0, description="shortest stretch of time over which iterations are summed up for the planner, seconds"
    )

    engine: Literal["mock", "sglang"] = Field("sglang", description="what computes")
    model_path: str = Field("", description="sglang: directory with safetensors, config and tokenizer")
    model_name: str = Field("", description="what nodes call the model; empty: the engine's own name")
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = Field(
        "float32", description="sglang: type of weights and KV"
    )
    block_tokens: int = Field(64, ge=1, description="tokens of a block, the same on all nodes")
    l1_tokens: int = Field(0, ge=0, description="KV capacity in device memory")
    l2_tokens: int = Field(
        0, ge=0, description="KV capacity in host memory; sglang: at least twice l1_tokens, as L2 keeps what L1 has"
    )
    chunk_tokens: int = Field(0, ge=0, description="most prompt tokens computed per iteration")
    max_prompt_tokens: int = Field(0, ge=0, description="longest prompt taken")
    max_context_tokens: int = Field(0, ge=0, description="mock: longest prompt with its output")
    decode_slots: int = Field(0, ge=0, description="most requests decoded at once")
    prefill_slots: int = Field(0, ge=0, description="sglang: most prompts computed, or waiting for decode, at once")
    engine_host: str = Field("", description="interface the engine listens on for peers; empty: that of listen")
    engine_advertise_host: str = Field("", description="host peers reach the engine by; empty: that of advertise")
    engine_port: int = Field(0, ge=0, le=65535, description="sglang: port for peers; 0 takes free ones")
    engine_start_timeout_s: float = Field(300.0, gt=0, description="sglang: from spawn to serving, seconds")
    engine_log_file: str = Field("", description="sglang: where the engine writes; empty: a temporary file")
    transport: Literal["mooncake-tcp", "mooncake-rdma", "tcp"] = Field(
        "mooncake-tcp",
        description="sglang: how KV travels between nodes, the same on all; tcp: authenticated by the token of "
        "token_file, host memory only, on the port after engine_port",
    )
    page_checksums: bool = Field(
        True,
        description="sglang: host pages carry a checksum that peers verify on arrival; off where that costs too much, "
        "as with rdma",
    )
    rdma_device: str = Field("", description="sglang: device names for mooncake-rdma, comma separated")
    sglang_flags: tuple[str, ...] = Field((), description="sglang: more flags for its own command line")
    mock_speed_up: float = Field(1.0, gt=0, description="mock: modelled durations are divided by this")
    mock_vocabulary_tokens: int = Field(32_000, ge=2, description="mock: size of its vocabulary")
    mock_verify_kv: bool = Field(
        True,
        description="mock: real KV bytes, checked wherever they travel; off: names only, for replays at the speed of "
        "real traces",
    )
    mock_bytes_per_token: int = Field(4, ge=1, description="mock: KV bytes of a token; real ones with mock_verify_kv")
    mock_tokens_per_iteration: int = Field(1, ge=1, description="mock: tokens accepted per decode iteration")
    mock_fetch_bytes_per_s: float = Field(
        0.0, ge=0, description="mock: speed of one read of a peer's KV, before speed_up; 0: no limit"
    )
    mock_crash_after_iterations: int = Field(0, ge=0, description="mock: die after so many iterations; 0: never")
    mock_transfer_delay_s: float = Field(0.0, ge=0, description="mock: added to each page sent, seconds")
    mock_corrupt_every_pages: int = Field(0, ge=0, description="mock: damage each so-manieth page sent; 0: none")

    @property
    def fetch(self) -> FetchConfig:
        """Bounds of this node's reads from peers."""
        return FetchConfig(readers=self.fetch_readers, bytes_per_s=self.fetch_bytes_per_s or math.inf)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.engine == "sglang" and not self.model_path:
            raise ValueError("model_path: is required with --engine sglang")
        for name, count in (("prefill_coefficients", 5), ("decode_coefficients", 4)):
            values = getattr(self, name)
            if values and (len(values) != count or min(values) < 0):
                raise ValueError(f"{name}: needs {count} numbers that are not negative, got {values}")
        return self
