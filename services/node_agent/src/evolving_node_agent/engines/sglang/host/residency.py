"""What the node holds: block events out of SGLang's tree, and where host copies lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.disaggregation.kv_events import StorageMedium
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.utils import compute_node_hash_values

from evolving_node_agent.engines.port import Tier
from evolving_node_agent.engines.sglang import messages as m

from .names import name_of_hash, names_of
from .needs import Needs

_TIERS = {StorageMedium.GPU: Tier.L1, StorageMedium.CPU: Tier.L2}
Change = m.BlocksStored | m.BlocksRemoved | m.TierCleared


class Residency:
    """Stands where SGLang's tree expects its event recorder; scheduler's thread only, except for `host_pages`.

    `host_pages` maps a name to (page, generation) of its host copy. The service reads it from its own thread: one
    lookup is atomic, and a copy evicted in between is found out by its generation.
    """

    enabled = True

    def __init__(self, block_tokens: int, seal: Callable[[list[int]], list[int]], needs: Needs) -> None:
        self._block_tokens = block_tokens
        self._seal = seal  # pages whose bytes are complete -> their generations
        self._needs = needs
        self._changes: list[Change] = [m.TierCleared(Tier.L1), m.TierCleared(Tier.L2)]
        self.host_pages: dict[bytes, tuple[int, int]] = {}
        needs.watch(self.host_pages)
        # Told of blocks that left a tier, and whether they are in none now.
        self.on_gone: Callable[[Tier, list[bytes], bool], None] = lambda *_: None

    def take_changes(self) -> tuple[Change, ...]:
        """The changes since the last call, in order."""
        changes, self._changes = tuple(self._changes), []
        return changes

    @property
    def zero_blocks(self) -> int:
        """Blocks in L2 that no branch counts."""
        return len(self.host_pages) - self._needs.l2_blocks

    def names(self, node: Any) -> list[bytes]:
        """The names of a node's blocks."""
        if node.hash_value is None:
            node.hash_value = compute_node_hash_values(node, self._block_tokens)
        return names_of(node)

    def record_store(self, node: Any, medium: Any = None, *, session_id: str | None = None) -> None:
        """A node got a copy in a tier (SGLang's interface)."""
        tier = _TIERS[medium or StorageMedium.GPU]
        names = self.names(node)
        parent = node.parent
        above = name_of_hash(parent.hash_value[-1]) if parent.parent is not None else None
        if tier is Tier.L2:
            slots = node.component_data[BASE_COMPONENT_TYPE].host_value
            pages = (slots[:: self._block_tokens] // self._block_tokens).tolist()
            self._needs.on_removed(name for name in names if name in self.host_pages)
            self.host_pages.update(zip(names, zip(pages, self._seal(pages), strict=True), strict=True))
        self._needs.on_stored(names, tier is Tier.L2)
        self._changes.append(m.BlocksStored(tier, above, b"".join(names)))

    def record_remove(self, node: Any, medium: Any = None) -> None:
        """A node lost its copy in a tier (SGLang's interface)."""
        tier = _TIERS[medium or StorageMedium.GPU]
        names = self.names(node)
        if tier is Tier.L2:
            self._needs.on_removed(name for name in names if self.host_pages.pop(name, None) is not None)
        self.on_gone(tier, names, tier is Tier.L2 or not node.backuped)
        self._changes.append(m.BlocksRemoved(tier, b"".join(names)))

    def record_all_cleared(self) -> None:
        """Both tiers were emptied (SGLang's interface)."""
        self.host_pages.clear()
        self._needs.watch(self.host_pages)
        self._changes += [m.TierCleared(Tier.L1), m.TierCleared(Tier.L2)]

    def take(self) -> list[Any]:
        """Nothing for SGLang's own publisher (SGLang's interface)."""
        return []
