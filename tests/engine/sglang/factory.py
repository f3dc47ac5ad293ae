"""Engines for tests: the tiny model, small pools, so that an engine starts in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.models import tiny_model

from evolving_node_agent.engines.port import Engine
from evolving_node_agent.engines.sglang import SglangConfig, SglangEngine

SECRET = b"the token of the tests' cluster"


def make_engine(tmp_path: Path, name: str, **overrides: Any) -> Engine:
    """An engine that was not started; `overrides` are fields of `SglangConfig`."""
    fields: dict[str, Any] = {
        "model_path": str(tiny_model()),
        "model_name": "tiny",
        "l1_tokens": 4096,
        "l2_tokens": 8192,
        "chunk_tokens": 256,
        "log_path": str(tmp_path / f"{name}.log"),
    }
    return SglangEngine(SglangConfig(**(fields | overrides)), SECRET)
