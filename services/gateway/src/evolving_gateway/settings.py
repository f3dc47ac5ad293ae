"""Settings of the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from evolving.core.config import FetchRule
from evolving.core.routing import RoutingConfig
from evolving.runtime.settings import ServiceSettings


class GatewaySettings(ServiceSettings):
    """The client API of a cluster: tokenises, routes, hands over and recovers requests."""

    service: ClassVar[str] = "gateway"

    tokenizer_path: Path | None = Field(
        None,
        description="the model's directory: tokenizer.json, chat template, generation_config.json; "
        "none: prompts must be token ids, outputs carry no text, and only the engine knows the end tokens",
    )

    fetch: FetchRule = Field(
        FetchRule.SOONER,
        description="what KV is fetched from peers: sooner, as much as makes the first token come soonest; for "
        "comparison: always, all they hold; never, nothing, it is used where it lies or computed",
    )
    fetch_bytes_per_s: float = Field(
        1e9, gt=0, description="rate of a node's reads from peers until it has measured its own, bytes a second"
    )
    fetch_fixed_s: float = Field(0.002, ge=0, description="time a fetch takes before its first byte, seconds")
    tie_share: float = Field(
        0.05, ge=0, le=1, description="nodes within this share of the best predicted time tie; a hash picks"
    )

    max_requests: int = Field(
        2048, ge=1, description="generations accepted and unfinished at once; more are RESOURCE_EXHAUSTED"
    )
    max_wait_s: float = Field(
        300.0, gt=0, description="predicted wait, on the best node, above which a new request is refused, seconds"
    )
    request_deadline_s: float = Field(
        3600.0, gt=0, description="longest a generation takes, also where its client set no deadline, seconds"
    )
    reserve_deadline_s: float = Field(
        30.0, gt=0, description="how long a decode node may look for room before another is asked, seconds"
    )
    requotes_max: int = Field(2, ge=0, le=10, description="times a node may send a request back for a longer wait")
    node_silence_s: float = Field(
        10.0, ge=2, description="a node whose status stream is silent for so long gets no new work, seconds"
    )
    recover_s: float = Field(
        60.0,
        ge=0,
        description="how long a request that lost its node goes without a place in a queue or a new token before it "
        "fails, seconds",
    )
    attempts_max: int = Field(
        10, ge=1, le=100, description="failed attempts in a row without a new token before a request fails"
    )
    directory_timeout_s: float = Field(
        0.5, gt=0, le=30, description="longest wait for the directory before routing goes by load alone, seconds"
    )
    finish_retry_s: float = Field(
        30.0, ge=0, description="how long the end of a request is told to a directory that does not answer, seconds"
    )
    known_requests: int = Field(65_536, ge=1, description="request ids kept to tell a retry from a conflict")
    known_requests_age_s: float = Field(3600.0, gt=0, description="how long a finished request id is kept, seconds")
    context_cache_bytes: int = Field(
        1 << 28, ge=0, description="memory for the last contexts of branches, so that only new tokens are hashed, bytes"
    )

    def routing(self) -> RoutingConfig:
        """How routing reckons; nodes bring their own time model."""
        return RoutingConfig(
            fetch_bytes_per_s=self.fetch_bytes_per_s,
            fetch_fixed_s=self.fetch_fixed_s,
            fetch=self.fetch,
            tie_share=self.tie_share,
        )
