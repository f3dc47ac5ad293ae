"""SGLang's class of one model, found without the import of its two hundred others, which takes seconds."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

_PACKAGE = "sglang.srt.models"


def module_of(architecture: str, directory: Path) -> str | None:
    """The module in a directory that has the class of this name among the models it offers."""
    for file in sorted(directory.glob("*.py")):
        text = file.read_text(encoding="utf-8")
        if f"\nclass {architecture}(" in text and "\nEntryClass = " in text:
            return file.stem
    return None


def classes_of(model_path: Path) -> list[Any]:
    """What SGLang would take for the model in this directory; empty where it is to look for itself among all."""
    architectures = json.loads((model_path / "config.json").read_text()).get("architectures") or []
    directory = Path(str(importlib.import_module(_PACKAGE).__path__[0]))
    name = module_of(architectures[0], directory) if len(architectures) == 1 else None
    if name is None:
        return []
    offered = importlib.import_module(f"{_PACKAGE}.{name}").EntryClass
    classes = offered if isinstance(offered, list) else [offered]
    return [each for each in classes if each.__name__ == architectures[0]]
