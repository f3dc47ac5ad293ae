"""A request on its way through a simulated cluster."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from evolving_sim.node_kv import Branch


@dataclass(slots=True, eq=False)
class Request:
    """What was asked, and when what happened to it."""

    request_id: str
    kind: str
    branch: Branch
    prompt_tokens: int
    output_tokens: int
    sent_s: float
    on_done: Callable[[], None]
    first_token_s: float = math.nan
    done_s: float = math.nan


@dataclass(slots=True, eq=False)
class PrefillLeg:
    """A prompt on the node that computes it."""

    request: Request
    fetch_until_blocks: int  # leading blocks it will have once peers' are here
    fetch_over: bool  # nothing is still to come
    # What it reuses: reckoned with while it waits, as it is once it is taken.
    cached_tokens: int
    restored_tokens: int
    computed_tokens: int = 0

    @property
    def uncached_tokens(self) -> int:
        """t_uc."""
        return self.request.prompt_tokens - self.cached_tokens

    @property
    def left_tokens(self) -> int:
        """Still to compute."""
        return self.uncached_tokens - self.computed_tokens


@dataclass(slots=True, eq=False)
class DecodeLeg:
    """An answer on the node that decodes it."""

    request: Request
    source: str  # node that prefills
    node_id: str  # that decodes, once it is chosen
    iterations: int  # n_it
    left_iterations: int
    growth_tokens: float  # t_acc
    context_tokens: float  # of the next iteration
    granted: bool = False  # it has a slot and room
    prefilled: bool = False
    context_sum: float = field(default=0.0)  # Σ over its iterations

    @property
    def room_tokens(self) -> int:
        """Device memory it takes."""
        return self.request.prompt_tokens + self.request.output_tokens
