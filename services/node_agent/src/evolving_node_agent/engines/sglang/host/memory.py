"""One KV pool for two phases: what each leaves to the other.

- A prompt that began is finished: decode runs as if the pages its remaining tokens need were gone (its *debt*).
- Prefill leaves decode room for one prompt of the longest kind, and decode leaves prefill as much, each less what it
  holds already. Two nodes that fill up with computed prompts for each other would otherwise wait for ever.
- The last decode that cannot grow while prefill holds memory waits a step and is not aborted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from .admission import Admission
from .legs import DecodeLeg, PrefillLeg


class Ledger:
    """Token counts of one scheduler. Scheduler's thread."""

    def __init__(self, scheduler: Any, reserve_tokens: int) -> None:
        self._scheduler = scheduler
        self._reserve_tokens = reserve_tokens
        self._block_tokens = int(scheduler.page_size)
        self.prefills: Mapping[str, PrefillLeg] = {}
        self.decodes: Mapping[str, DecodeLeg] = {}

    def prefill_owned_tokens(self) -> int:
        """KV of prompts that are computing or wait for their decode leg, with what they will still need, and without
        what was cached before them."""
        return sum(leg.owned_tokens for leg in self.prefills.values())

    def decode_owned_tokens(self) -> int:
        """KV of reservations and of prompts being decoded; their output comes on top."""
        return sum(leg.owned_tokens for leg in self.decodes.values())

    def free_tokens(self) -> int:
        """Tokens that can be allocated now, evicting plain cache."""
        scheduler = self._scheduler
        available = scheduler.token_to_kv_pool_allocator.available_size()
        return int(available + scheduler.tree_cache.full_evictable_size())

    def debt_tokens(self) -> int:
        """What the prompt between two chunks still needs, and a block its last chunk may open."""
        request = self._scheduler.chunked_req
        if request is None:
            return 0
        left = len(request.origin_input_ids) + len(request.output_ids) - (request.extend_end or 0)
        return self.in_blocks(int(left)) + self._block_tokens

    def for_decode(self) -> int:
        """Tokens prefill must leave."""
        return max(0, self._reserve_tokens - self.decode_owned_tokens())

    def for_prefill(self) -> int:
        """Tokens decode's reservations must leave."""
        return max(0, self._reserve_tokens - self.prefill_owned_tokens()) + self.debt_tokens()

    def in_blocks(self, tokens: int) -> int:
        """Rounded up to whole blocks."""
        return -(-tokens // self._block_tokens) * self._block_tokens

    def allocate(self, tokens: int) -> Any | None:
        """Slots for whole blocks, evicting what is needed, or None."""
        allocator = self._scheduler.token_to_kv_pool_allocator
        missing = tokens - allocator.available_size()
        if missing > 0:
            self._scheduler.tree_cache.evict_for_alloc(EvictParams(num_tokens=missing))
        return allocator.alloc(tokens)


def adder_class(ledger: Ledger, admission: Admission) -> type[PrefillAdder]:
    """SGLang's admission of prompts, less those that are not runnable and what belongs to decode."""

    class ReservingAdder(PrefillAdder):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.memory_budget.total_offset += ledger.for_decode()

        def add_one_req(self, req: Any, has_chunked_req: bool, truncation_align_size: int | None) -> Any:
            """SGLang's walk of its queue is at this request; CONTINUE without adding it passes it over."""
            if isinstance(req.leg, PrefillLeg) and not admission.lets(req.leg, lambda: self._has_room(req)):
                return AddReqResult.CONTINUE
            return super().add_one_req(req, has_chunked_req, truncation_align_size)

        def _has_room(self, req: Any) -> bool:
            """Whether upstream would add the request now; as in its own `add_one_req`, without effects."""
            new_tokens = max(0, req.sampling_params.max_new_tokens - len(req.output_ids))
            prompt_tokens = len(req.full_untruncated_fill_ids) - req.prefix_len
            with self._lock_node(req.last_node):
                chosen = self._select_prefill_admission(
                    req,
                    total_tokens=prompt_tokens + new_tokens + self.per_req_token_overhead,
                    host_hit_length=req.host_hit_length,
                    swa_host_hit_length=req.swa_host_hit_length,
                    truncation_align_size=None,
                )
            return not isinstance(chosen, AddReqResult)

    return ReservingAdder


def charge_debt(allocator: Any, ledger: Ledger) -> None:
    """Make decode's own capacity check count the debt: it retracts before a started prompt runs out."""
    check = allocator.check_decode_capacity

    def check_decode_capacity(*, num_tokens: int, **rest: Any) -> bool:
        return bool(check(num_tokens=num_tokens + ledger.debt_tokens(), **rest))

    allocator.check_decode_capacity = check_decode_capacity
