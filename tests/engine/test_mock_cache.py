"""The mock's KV bytes follow its pool: whatever a tier holds has the bytes of its name, wherever they came from."""

from __future__ import annotations

from engine.sglang.driving import BLOCK, names, prompt

from evolving.core.pool_runs import Use
from evolving_node_agent.engines.mock import MockConfig
from evolving_node_agent.engines.mock.cache import BlockCache
from evolving_node_agent.engines.mock.model import block_kv
from evolving_node_agent.engines.port import Tier

CONFIG = MockConfig(
    "a", max_prompt_tokens=4 * BLOCK, max_context_tokens=6 * BLOCK, l1_tokens=12 * BLOCK, l2_tokens=20 * BLOCK
)
CONTEXT = names(prompt(1, 8 * BLOCK))


def kv(block_names: list[bytes]) -> list[bytes]:
    """What these blocks' bytes must be."""
    return [block_kv(name, CONFIG.page_bytes) for name in block_names]


def copies(cache: BlockCache, block_names: list[bytes], tier: Tier) -> list[bytes | None]:
    """What lies in a tier."""
    return [cache.read(name, tier) for name in block_names]


def compute(cache: BlockCache, block_names: list[bytes]) -> None:
    """A leg computes a context, reusing what is here, and ends."""
    in_l1 = cache.pool.matched(block_names, len(block_names), Tier.L1)
    cache.pool.lock(block_names, 0, in_l1, Use.PREFILL)
    cache.pool.reserve(len(block_names) - in_l1, Use.PREFILL)
    held = cache.pool.held(block_names, len(block_names))
    cache.commit(block_names, in_l1, held, Use.PREFILL)
    cache.commit(block_names, held, len(block_names), Use.PREFILL, kv(block_names[held:]))
    cache.pool.unlock(block_names, len(block_names), Use.PREFILL)


def test_bytes_are_those_of_the_name_in_either_tier() -> None:
    cache = BlockCache(CONFIG)
    compute(cache, CONTEXT[:4])
    assert cache.store_fetched(CONTEXT, 4, 8, kv(CONTEXT[4:])) == 8
    assert copies(cache, CONTEXT, Tier.L1) == [*kv(CONTEXT[:4]), None, None, None, None]
    assert copies(cache, CONTEXT, Tier.L2) == kv(CONTEXT)
    cache.pool.free_l1()
    assert copies(cache, CONTEXT, Tier.L1) == [None] * 8
    compute(cache, CONTEXT)  # from L2
    assert copies(cache, CONTEXT, Tier.L1) == kv(CONTEXT)
    for seed in range(2, 6):
        compute(cache, names(prompt(seed, 8 * BLOCK)))
        cache.check_invariants()
    assert copies(cache, CONTEXT, Tier.L2) == [None] * 8


def test_a_restored_block_is_as_its_copy_was() -> None:
    cache = BlockCache(CONFIG)
    compute(cache, CONTEXT)
    cache.damage(CONTEXT[2], Tier.L2)
    damaged = cache.read(CONTEXT[2], Tier.L2)
    cache.pool.free_l1()
    compute(cache, CONTEXT)
    assert cache.read(CONTEXT[2], Tier.L1) == damaged != kv(CONTEXT[2:3])[0]
