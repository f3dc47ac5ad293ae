"""Our SGLang plugin (entry point group `sglang.srt.plugins`): inert in any process but an engine's."""

from __future__ import annotations

from pathlib import Path

from evolving_node_agent.engines.sglang.config import SglangConfig

from .inbox import Inbox

_active: list[tuple[SglangConfig, Inbox]] = []


def activate(config: SglangConfig, inbox: Inbox) -> None:
    """Say, before plugins are loaded, that this process is an engine."""
    _active.append((config, inbox))


def served_model() -> Path:
    """The directory of the model this engine serves."""
    return Path(_active[-1][0].model_path)


def register() -> None:
    """Replace SGLang's scheduler by ours and add our eviction order and block names; called by SGLang."""
    if not _active:
        return
    import torch
    from sglang.srt.arg_groups.choices import add_radix_eviction_policy_choices
    from sglang.srt.mem_cache import utils as cache_utils
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from .eviction import NeedStrategy
    from .launch import EVICTION_POLICY
    from .names import chain_seed, page_hashes
    from .scheduler import NodeScheduler

    config, inbox = _active[-1]
    NodeScheduler.config, NodeScheduler.inbox = config, inbox
    if not torch.cuda.is_available():
        from . import cpu

        cpu.adapt()
    NeedStrategy.policy = config.eviction
    cache_utils._EVICTION_POLICY_FACTORIES[EVICTION_POLICY] = NeedStrategy
    add_radix_eviction_policy_choices([EVICTION_POLICY])
    HookRegistry.register("sglang.srt.mem_cache.utils.storage_namespace_seed", chain_seed, HookType.AROUND)
    HookRegistry.register("sglang.srt.mem_cache.utils.get_native_hash", page_hashes, HookType.AROUND)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler", NodeScheduler, HookType.REPLACE)
    HookRegistry.register("sglang.srt.managers.scheduler.dispatch_event_loop", NodeScheduler.run_loop, HookType.REPLACE)
