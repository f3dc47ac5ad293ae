"""Which engine, with what. The heavy one is imported only when it is asked for."""

from __future__ import annotations

import math
from dataclasses import astuple, replace
from typing import Any

from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients
from evolving.runtime.clock import Clock
from evolving.runtime.settings import SettingsError, is_wildcard, split_address
from evolving_node_agent.engines.mock import FaultPlan, MockConfig, MockEngine
from evolving_node_agent.engines.port import Engine
from evolving_node_agent.settings import NodeAgentSettings

# Of a 135M model in float32 on one CPU core: about 1,000 tokens/s of prefill. Another machine or model sets its own.
_SGLANG_PREFILL = PrefillCoefficients(0.01, 9e-4, 1e-7, 1e-6, 0.0)
_SGLANG_DECODE = DecodeCoefficients(0.02, 0.0, 0.003, 2e-6)


def make_engine(settings: NodeAgentSettings, clock: Clock) -> Engine:
    """The engine of the settings, not started. Raises SettingsError when they don't fit it."""
    try:
        return MockEngine(_mock_config(settings), clock) if settings.engine == "mock" else _sglang(settings)
    except ValueError as error:
        raise SettingsError(f"--engine {settings.engine}: {error}") from error


def coefficients(settings: NodeAgentSettings) -> tuple[PrefillCoefficients, DecodeCoefficients]:
    """Equations 1 and 2 of this node, seconds."""
    if settings.engine == "mock":
        config = _mock_config(settings)
        return _faster_prefill(config.prefill, config.speed_up), _faster_decode(config.decode, config.speed_up)
    given_prefill, given_decode = settings.prefill_coefficients, settings.decode_coefficients
    prefill = PrefillCoefficients(*given_prefill) if given_prefill else _SGLANG_PREFILL
    return prefill, _decode_of(given_decode) if given_decode else _SGLANG_DECODE


def _mock_config(settings: NodeAgentSettings) -> MockConfig:
    chosen = _sizes(
        settings,
        "l1_tokens",
        "l2_tokens",
        "chunk_tokens",
        "max_prompt_tokens",
        "max_context_tokens",
        "decode_slots",
    )
    if settings.prefill_coefficients:
        chosen["prefill"] = PrefillCoefficients(*settings.prefill_coefficients)
    if settings.decode_coefficients:
        chosen["decode"] = _decode_of(settings.decode_coefficients)
    return MockConfig(
        settings.node_id,
        model=settings.model_name or "mock",
        block_tokens=settings.block_tokens,
        vocab_size=settings.mock_vocabulary_tokens,
        verify_kv=settings.mock_verify_kv,
        bytes_per_token=settings.mock_bytes_per_token,
        tokens_per_iteration=settings.mock_tokens_per_iteration,
        fetch_bytes_per_s=settings.mock_fetch_bytes_per_s or math.inf,
        eviction=settings.eviction,
        fetch_start=settings.fetch_start,
        fetch=settings.fetch,
        speed_up=settings.mock_speed_up,
        host=_bind_host(settings),
        advertise_host=_advertise_host(settings),
        faults=FaultPlan(
            crash_after_iterations=settings.mock_crash_after_iterations,
            transfer_delay_s=settings.mock_transfer_delay_s,
            corrupt_every_pages=settings.mock_corrupt_every_pages,
        ),
        **chosen,
    )


def _decode_of(values: tuple[float, ...]) -> DecodeCoefficients:
    d0_s, d1_s, d2_s, d3_s = values
    return DecodeCoefficients(d0_s, d1_s, d2_s, d3_s)


def _faster_prefill(slow: PrefillCoefficients, speed_up: float) -> PrefillCoefficients:
    return PrefillCoefficients(*(value / speed_up for value in astuple(slow)))


def _faster_decode(slow: DecodeCoefficients, speed_up: float) -> DecodeCoefficients:
    return replace(
        slow,
        d0_s=slow.d0_s / speed_up,
        d1_s=slow.d1_s / speed_up,
        d2_s=slow.d2_s / speed_up,
        d3_s=slow.d3_s / speed_up,
    )


def _sglang(settings: NodeAgentSettings) -> Engine:
    from evolving_node_agent.engines.sglang.config import SglangConfig
    from evolving_node_agent.engines.sglang.engine import SglangEngine

    sizes = _sizes(
        settings, "l1_tokens", "l2_tokens", "chunk_tokens", "max_prompt_tokens", "decode_slots", "prefill_slots"
    )
    return SglangEngine(
        SglangConfig(
            settings.model_path,
            model_name=settings.model_name,
            dtype=settings.dtype,
            block_tokens=settings.block_tokens,
            bind_host=_bind_host(settings),
            advertise_host=_advertise_host(settings),
            port=settings.engine_port,
            transport=settings.transport,
            rdma_device=settings.rdma_device,
            eviction=settings.eviction,
            fetch_start=settings.fetch_start,
            fetch=settings.fetch,
            page_checksums=settings.page_checksums,
            start_timeout_s=settings.engine_start_timeout_s,
            log_path=settings.engine_log_file,
            extra_flags=settings.sglang_flags,
            **sizes,
        ),
        (settings.bearer_token() or "").encode(),
    )


def _sizes(settings: NodeAgentSettings, *names: str) -> dict[str, Any]:
    """Those that were set; the others stay the engine's own."""
    return {name: getattr(settings, name) for name in names if getattr(settings, name)}


def _bind_host(settings: NodeAgentSettings) -> str:
    return settings.engine_host or split_address(settings.listen)[0]


def _advertise_host(settings: NodeAgentSettings) -> str:
    if settings.engine_advertise_host:
        return settings.engine_advertise_host
    if settings.advertise:
        return split_address(settings.advertise)[0]
    return "" if is_wildcard(f"{_bind_host(settings)}:0") else _bind_host(settings)
