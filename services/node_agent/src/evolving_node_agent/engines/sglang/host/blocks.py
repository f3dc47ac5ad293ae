"""Blocks in SGLang's tree: looking them up, publishing output, taking in what came from peers. Scheduler's thread."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE

from evolving_node_agent.engines.port import Tier, TokenIds

from .legs import DecodeLeg
from .names import name_of_hash, namespace
from .pages import KvPages
from .residency import Residency


class BlockStore:
    """The tree with its two tiers."""

    def __init__(self, tree_cache: Any, pages: KvPages) -> None:
        self._tree = tree_cache
        self.pages = pages
        self._block_tokens = int(tree_cache.page_size)
        self.residency = Residency(self._block_tokens, pages.generation)
        tree_cache.tree_core.kv_events = self.residency
        self._leaving_l1: set[bytes] = set()

    def cached_tokens(self, tokens: TokenIds, root: bytes) -> int:
        """Leading tokens of a prompt that either tier holds. The last token is always computed."""
        match = self._match(tokens[:-1], root)
        return int(match.device_prefix_len + match.host_hit_length)

    def publish_output(self, request: Any) -> None:
        """Put a running decode's completed blocks into the tree, and so through to L2."""
        if request.finished() or not isinstance(request.leg, DecodeLeg) or not request.kv.holds_kv:
            return
        committed = request.kv.kv_committed_len
        if committed - request.kv.cache_protected_len >= self._block_tokens:
            request.refresh_fill_ids()
            self._tree.checkpoint(request, up_to=committed)

    def allocate_host(self, blocks: int) -> torch.Tensor | None:
        """Host slots for blocks that a peer will send, or None."""
        return self.pages.allocate_host(blocks, self._tree.evict_host)

    def insert_fetched(
        self, tokens: TokenIds, root: bytes, digests: list[bytes], first_block: int, slots: torch.Tensor, blocks: int
    ) -> int:
        """Add host copies of blocks [first_block, first_block + blocks) that a peer's bytes were read into.

        `digests` are the full ones of the prompt's blocks. Slots that are not taken (a block came another way, or its
        parent left) are freed. Returns the tokens of the prompt that are cached then.
        """
        width = self._block_tokens
        wanted = slots[: blocks * width]
        self.pages.free_host(slots[blocks * width :])
        held = self.cached_tokens(tokens, root) // width
        known = max(0, held - first_block)
        if held < first_block or known >= blocks:
            self.pages.free_host(wanted)
            return held * width
        self.pages.free_host(wanted[: known * width])
        start = first_block + known
        end = first_block + blocks
        match = self._match(tokens[: start * width], root)
        key = RadixKey(array("q", tokens[start * width : end * width].tolist()), namespace(root))
        hashes = [digest.hex() for digest in digests[start:end]]
        fresh = wanted[known * width :]
        result = self._tree.tree_core.insert_host(match.best_match_node, key, fresh, hashes)
        self._tree._apply_cache_actions(result.cache_actions)
        if result.host_insert_dropped:
            self.pages.free_host(fresh)
        elif result.prefix_len:
            self.pages.free_host(fresh[: result.prefix_len])
        return self.cached_tokens(tokens, root)

    def free_l1(self) -> int:
        """Drop from L1 the blocks that L2 has too, those in use when they are no longer; the blocks dropped now."""
        stack = list(self._tree.tree_core.root_node.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            data = node.component_data[BASE_COMPONENT_TYPE]
            if data.value is not None and data.host_value is not None:
                self._leaving_l1.update(self.residency.names(node))
        return self.drop_leaving()

    def drop_leaving(self) -> int:
        """Drop what `free_l1` marked and nobody uses any more; the blocks dropped."""
        dropped = 0
        while self._leaving_l1:
            leaves = [node for node in self._tree.tree_core.evictable_device_leaves if self._leaves_l1(node)]
            if not leaves:
                break
            for node in leaves:
                names = self.residency.names(node)
                self._tree._demote(node.id, defaultdict(int))
                self._leaving_l1.difference_update(names)
                dropped += len(names)
        return dropped

    def _leaves_l1(self, node: Any) -> bool:
        """Whether the node, or what it continues, is marked: output of a marked request leaves with its prompt."""
        if not node.backuped:
            return False
        while node.parent is not None:
            if self.residency.names(node)[-1] in self._leaving_l1:
                return True
            node = node.parent
        return False

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

    def _match(self, tokens: TokenIds, root: bytes) -> Any:
        key = RadixKey(array("q", tokens.tolist()), namespace(root))
        return self._tree.match_prefix(MatchPrefixParams(key=key))
