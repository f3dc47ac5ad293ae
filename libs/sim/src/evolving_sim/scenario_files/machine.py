"""The machine of a scenario file: one of ours, or one's own nodes by the time model that their planner fitted."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients
from evolving_sim.machines import GLM_5_2, KIMI_K2_6

MACHINES = {"glm-5.2": GLM_5_2, "kimi-k2.6": KIMI_K2_6}

Values = dict[str, Any]


def whole_machine(given: Values, folder: Path) -> Values:
    """A machine's own keys over those of the machine it is `like` and of the `fitted` model.

    fitted: a file of `evolvectl --json plan model`, relative to `folder`. Raises ValueError.
    """
    own = dict(given)
    like, fitted = own.pop("like", None), own.pop("fitted", None)
    whole: Values = {}
    if like is not None:
        if like not in MACHINES:
            raise ValueError(f"like must be one of {', '.join(MACHINES)}, got {like!r}")
        whole = asdict(MACHINES[like])
    if fitted is not None:
        if not isinstance(fitted, str):
            raise ValueError(f"fitted must be the path of a file, got {fitted!r}")
        whole = merged(whole, _fitted(folder / fitted))
    whole = merged(whole, own)
    decode = whole.get("decode")
    if fitted is not None and decode and decode["d1_s"] and not decode.get("experts"):
        raise ValueError("the fitted model reads experts: give decode.experts_per_token and decode.experts")
    return whole


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> Values:
    """Both tables, and what is in both from `over`; tables within them likewise."""
    both = dict(under)
    for key, value in over.items():
        below = both.get(key)
        both[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return both


def _fitted(path: Path) -> Values:
    """Coefficients as the mean over the nodes, which predicts the mean of what each predicts. Raises ValueError."""
    try:
        nodes = json.loads(path.read_text(encoding="utf-8"))["nodes"]
        prefill = [node["prefill_coefficients_s"] for node in nodes]
        decode = [node["decode_coefficients_s"] for node in nodes]
        return {"prefill": _means(prefill, PrefillCoefficients), "decode": _means(decode, DecodeCoefficients)}
    except OSError as error:
        raise ValueError(f"fitted: {path} can't be read: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"fitted: {path} is not what `evolvectl --json plan model` prints: {error!r}") from error


def _means(rows: list[list[float]], kind: type[PrefillCoefficients | DecodeCoefficients]) -> Values:
    names = [field.name for field in fields(kind)]
    if not rows or not all(rows):
        raise ValueError("a node without coefficients")
    return {name: statistics.fmean(values) for name, values in zip(names, zip(*rows, strict=True), strict=False)}
