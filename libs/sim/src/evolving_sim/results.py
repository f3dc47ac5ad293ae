"""What a simulated run served, and when."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from evolving_sim.legs import Request


@dataclass(frozen=True, slots=True)
class Served:
    """A request that was answered."""

    kind: str
    sent_s: float
    first_token_s: float
    done_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Summary:
    """The requests answered in a stretch of time."""

    requests: int
    requests_per_s: float
    output_tokens_per_s: float
    ttft_s_mean: float
    ttft_s_p95: float
    e2e_s_mean: float


@dataclass(slots=True)
class Results:
    """Answered requests, in order."""

    served: list[Served] = field(default_factory=list)

    def add(self, request: Request) -> None:
        """A request is answered."""
        self.served.append(
            Served(
                request.kind,
                request.sent_s,
                request.first_token_s,
                request.done_s,
                request.prompt_tokens,
                request.output_tokens,
            )
        )

    def between(self, from_s: float, to_s: float) -> Summary:
        """What was answered in [from_s, to_s). Means of nothing are nan."""
        served = [each for each in self.served if from_s <= each.done_s < to_s]
        ttft_s = np.array([each.first_token_s - each.sent_s for each in served])
        e2e_s = np.array([each.done_s - each.sent_s for each in served])
        empty = not served
        return Summary(
            requests=len(served),
            requests_per_s=len(served) / (to_s - from_s),
            output_tokens_per_s=sum(each.output_tokens for each in served) / (to_s - from_s),
            ttft_s_mean=float("nan") if empty else float(ttft_s.mean()),
            ttft_s_p95=float("nan") if empty else float(np.percentile(ttft_s, 95)),
            e2e_s_mean=float("nan") if empty else float(e2e_s.mean()),
        )
