"""The planner's record of fitted time models in etcd."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Generic

from pydantic import Field, TypeAdapter, ValidationError

from evolving.core.fit import Coefficients, Fitted
from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients, decode_takes_time, prefill_takes_time
from evolving.runtime.keys import BadRecord, NodeRegistration

_Finite = Annotated[float, Field(allow_inf_nan=False)]

_ROWS_MAX = 2**32 - 1  # what a message holds


@dataclass(frozen=True, slots=True)
class Facts:
    """What has to be equal for the iterations of two nodes to take equally long, as far as it is known. How much memory
    is left for KV is not among it: engines measure that, and two alike hardly ever find the same."""

    model: str
    kv_format: str
    block_tokens: int
    chunk_tokens: int
    decode_slots: int
    kv_bytes_per_token: int
    experts: int
    experts_per_token: int
    prefill_coefficients: tuple[_Finite, _Finite, _Finite, _Finite, _Finite]  # c0..c4, as configured
    decode_coefficients: tuple[_Finite, _Finite, _Finite, _Finite]  # d0..d3, as configured


@dataclass(frozen=True, slots=True)
class PhaseFit(Generic[Coefficients]):
    """One phase of one node, fitted."""

    fitted: Fitted[Coefficients]
    fitted_at_s: float  # unix time


@dataclass(frozen=True, slots=True)
class NodeFits:
    """What is fitted of a node."""

    node_id: str
    facts: Facts  # of the node while it was measured
    prefill: PhaseFit[PrefillCoefficients] | None
    decode: PhaseFit[DecodeCoefficients] | None


_RECORD: TypeAdapter[tuple[NodeFits, ...]] = TypeAdapter(tuple[NodeFits, ...])


def facts_of(node: NodeRegistration) -> Facts:
    """What a node registered that decides how long its iterations take."""
    return Facts(
        model=node.model,
        kv_format=node.kv_format,
        block_tokens=node.block_tokens,
        chunk_tokens=node.chunk_tokens,
        decode_slots=node.decode_slots,
        kv_bytes_per_token=node.kv_bytes_per_token,
        experts=node.experts,
        experts_per_token=min(node.experts_per_token, node.experts),
        prefill_coefficients=node.prefill_coefficients,
        decode_coefficients=node.decode_coefficients,
    )


def encode_fits(fits: Iterable[NodeFits]) -> bytes:
    """JSON, UTF-8."""
    return _RECORD.dump_json(tuple(fits))


def decode_fits(value: bytes) -> tuple[NodeFits, ...]:
    """What `encode_fits` was given. Raises BadRecord."""
    try:
        record = _RECORD.validate_json(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "value"
        raise BadRecord(f"not a record of fitted models: {where}: {first['msg']}") from error
    for node in record:
        usable = (node.prefill is None or prefill_takes_time(node.prefill.fitted.coefficients)) and (
            node.decode is None or decode_takes_time(node.decode.fitted.coefficients)
        )
        if not usable or not all(_says_how_well(fit) for fit in (node.prefill, node.decode) if fit is not None):
            raise BadRecord(f"not a record of fitted models: no fit gives what is said of node {node.node_id!r}")
    if len({node.node_id for node in record}) < len(record):
        raise BadRecord("not a record of fitted models: a node is in it twice")
    return record


def _says_how_well(fit: PhaseFit[PrefillCoefficients] | PhaseFit[DecodeCoefficients]) -> bool:
    errors = (fit.fitted.error_in_sample, fit.fitted.error_left_out)
    return (
        0 < fit.fitted.rows <= _ROWS_MAX
        and math.isfinite(fit.fitted_at_s)
        and all(0 <= error < math.inf for error in errors)
    )
