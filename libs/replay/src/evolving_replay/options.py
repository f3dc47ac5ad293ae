"""How a replay is played."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from evolving_client import RetryPolicy


class Arrivals(Enum):
    """When sessions come."""

    CLOSED = "closed"
    """So many at a time: one that ends is replaced by the next."""
    OPEN = "open"
    """Each request when the trace says, however busy the cluster is. Only for traces that tell it."""


class ReplayError(Exception):
    """This can't be played; the message says why."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Where and how to play."""

    gateways: tuple[str, ...]
    """host:port of one cluster's gateways; calls stay with one until it fails."""
    token: str | None = None
    """Bearer token, where the cluster has credentials."""
    model: str = ""
    """"": the only one served."""
    concurrency: int = 30
    """Sessions at a time, with closed arrivals."""
    compression: float = 1.0
    """Times in which agents think or come are divided by this; the cluster's own are what they are."""
    arrivals: Arrivals = Arrivals.CLOSED
    stagger_s: float = 600.0
    """The first sessions of closed arrivals start spread over so much of the trace's time, seconds."""
    seed: int = 0
    """Another seed makes other tokens: a second replay against the same cluster then finds nothing of the first."""
    request_timeout_s: float = 1800.0
    """Longest a request may take, retries and waits included, seconds."""
    retry: RetryPolicy = field(default_factory=lambda: RetryPolicy(max_overload_wait_s=600.0))

    def __post_init__(self) -> None:
        if not self.gateways:
            raise ValueError("give the address of at least one gateway")
        if self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {self.concurrency}")
        if not 0 < self.compression < float("inf"):
            raise ValueError(f"compression must be above 0, got {self.compression}")
        if not 0 <= self.stagger_s < float("inf"):
            raise ValueError(f"stagger_s must not be negative, got {self.stagger_s}")
        if not 0 < self.request_timeout_s < float("inf"):
            raise ValueError(f"request_timeout_s must be above 0, got {self.request_timeout_s}")
