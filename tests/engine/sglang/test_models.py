"""Which of SGLang's modules has the class of a model: no engine."""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path

import pytest

from evolving_node_agent.engines.sglang.host.models import module_of

UPSTREAM = Path(str(distribution("sglang").locate_file("sglang/srt/models")))


@pytest.mark.parametrize(
    ("architecture", "module"),
    [("LlamaForCausalLM", "llama"), ("Qwen2ForCausalLM", "qwen2"), ("Qwen3MoeForCausalLM", "qwen3_moe")],
)
def test_a_model_is_found_in_its_module(architecture: str, module: str) -> None:
    assert module_of(architecture, UPSTREAM) == module


def test_what_no_module_offers_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("\nclass Part(Module):\n    pass\n")
    (tmp_path / "b.py").write_text("\nclass Whole(Module):\n    pass\n\nEntryClass = Whole\n")
    assert module_of("Whole", tmp_path) == "b"
    assert module_of("Part", tmp_path) is None, "it is a part of other models"
    assert module_of("Who", tmp_path) is None
