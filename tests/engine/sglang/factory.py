"""Engines for tests: the tiny model, small pools, so that an engine starts in seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.models import tiny_model

from evolving_node_agent.engines.port import Engine
from evolving_node_agent.engines.sglang import SglangConfig, SglangEngine

SECRET = b"the token of the tests' cluster"


def engine_config(**overrides: Any) -> SglangConfig:
    """The settings of an engine with room for everything a test does."""
    fields: dict[str, Any] = {
        "model_path": str(tiny_model()),
        "model_name": "tiny",
        "l1_tokens": 4096,
        "l2_tokens": 8192,
        "chunk_tokens": 128,
    }
    return SglangConfig(**(fields | overrides))


def make_engine(directory: Path, name: str, **overrides: Any) -> Engine:
    """An engine that was not started; `overrides` are fields of `SglangConfig`."""
    return SglangEngine(replace(engine_config(**overrides), log_path=str(directory / f"{name}.log")), SECRET)
