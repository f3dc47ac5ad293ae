"""Blocks in SGLang's tree: looking them up, publishing output. Scheduler's thread."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE

from evolving_node_agent.engines.port import Tier, TokenIds
from evolving_node_agent.engines.sglang.translate import id_array

from .checksums import PageChecksums
from .eviction import EvenNodes, NeedStrategy
from .legs import DecodeLeg
from .names import name_of_hash, namespace
from .pages import KvPages
from .residency import Residency


class BlockStore:
    """The tree with its two tiers."""

    def __init__(self, tree_cache: Any, pages: KvPages, page_checksums: bool) -> None:
        self._tree = tree_cache
        self.pages = pages
        self._block_tokens = int(tree_cache.page_size)
        self.checksums = PageChecksums(pages.host_buffer, pages.generations, page_checksums)
        self.residency = Residency(self._block_tokens, self.checksums.seal, NeedStrategy.needs)
        tree_cache.tree_core.kv_events = self.residency
        EvenNodes(tree_cache)

    def cached_tokens(self, tokens: TokenIds, root: bytes) -> int:
        """Leading tokens of a prompt that either tier holds. The last token is always computed."""
        match = self.match(tokens[:-1], root)
        return int(match.device_prefix_len + match.host_hit_length)

    def insert_host(
        self, tokens: TokenIds, root: bytes, first_block: int, digests: list[bytes], slots: torch.Tensor
    ) -> int:
        """Add host copies of a prompt's blocks from `first_block` on, below those before them.

        How many of the slots, the last ones, the tree took.
        """
        start, end = first_block * self._block_tokens, first_block * self._block_tokens + len(slots)
        node = self.match(tokens[:start], root).best_match_node
        key = RadixKey(id_array(tokens[start:end]), namespace(root))
        result = self._tree.tree_core.insert_host(node, key, slots, [digest.hex() for digest in digests])
        self._tree._apply_cache_actions(result.cache_actions)
        return 0 if result.host_insert_dropped else len(slots) - int(result.prefix_len)

    def publish_output(self, request: Any) -> None:
        """Put a running decode's completed blocks into the tree, and so through to L2."""
        if request.finished() or not isinstance(request.leg, DecodeLeg) or not request.kv.holds_kv:
            return
        committed = request.kv.kv_committed_len
        if committed - request.kv.cache_protected_len >= self._block_tokens:
            request.refresh_fill_ids()
            self._tree.checkpoint(request, up_to=committed)

    def digests(self, names: Iterable[bytes], tier: Tier) -> dict[bytes, bytes]:
        """SHA-256 of the KV bytes of those named blocks that the tier holds. Walks the whole tree: for checks."""
        wanted, found = set(names), {}
        stack = [self._tree.tree_core.root_node]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            for index, page_hash in enumerate(node.hash_value or ()):
                name = name_of_hash(page_hash)
                if name in wanted and (digest := self._digest(node, index, tier)) is not None:
                    found[name] = digest
        return found

    def _digest(self, node: Any, index: int, tier: Tier) -> bytes | None:
        data = node.component_data[BASE_COMPONENT_TYPE]
        slots = data.value if tier is Tier.L1 else data.host_value
        if slots is None:
            return None
        of_block = slots[index * self._block_tokens : (index + 1) * self._block_tokens]
        if tier is Tier.L1:
            return self.pages.l1_digest(of_block)
        return self.pages.l2_digest(int(of_block[0]) // self._block_tokens)

    def match(self, tokens: TokenIds, root: bytes) -> Any:
        """SGLang's match of a prompt's leading tokens."""
        key = RadixKey(id_array(tokens), namespace(root))
        return self._tree.match_prefix(MatchPrefixParams(key=key))
