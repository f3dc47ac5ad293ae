"""Equations 3 to 5 of the paper: what a node and a split can serve (section 4.3)."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace

import numpy as np
import pytest
from core.planning import MODELS, WORKS, mean_work, node_model
from hypothesis import given
from hypothesis import strategies as st

from evolving.core.terms import Role
from evolving.core.throughput import IterationTimes, Kinds, MeanWork, NodeModel, Throughput, throughput
from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients

P, D, M, X = Role.PREFILL, Role.DECODE, Role.MIXED, Role.DRAINING
PREFILL = PrefillCoefficients(c0_s=0.5, c1_s=0.01, c2_s=1e-5, c3_s=0.002, c4_s=0.0003)
DECODE = DecodeCoefficients(d0_s=0.01, d1_s=0.02, d2_s=0.001, d3_s=1e-6, experts_per_token=1, experts=4)
NODE = NodeModel(PREFILL, DECODE, new_tokens_per_iteration=200, decode_slots=8)
WORK = MeanWork(50, 6275, 100, 40, decode_iterations=20, context_tokens=160)
FLEETS = st.lists(MODELS, min_size=1, max_size=5)


def seconds(model: NodeModel, batch: float, work: MeanWork) -> float:
    """T_D as equation 2 has it, for a whole request at least."""
    batch = max(batch, 1.0)
    return model.decode.decode_iteration_s(batch, batch * work.context_tokens, model.tokens_per_request)


def at_once(model: NodeModel, work: MeanWork) -> float:
    """Requests that have a slot and room."""
    return max(1.0, min(model.decode_slots, model.decode_tokens / work.context_tokens))


def spread(models: list[NodeModel], work: MeanWork, open_requests: float) -> list[float]:
    """B of each node. `Kinds` counts equal models once, so look each of them up."""
    kinds = Kinds(models)
    curve = IterationTimes(kinds.models, work.context_tokens)
    batches = curve.spread(kinds.count(models)[np.newaxis], open_requests)[0]
    return [float(batches[kinds.of(model)]) for model in models]


def naive_spread(models: list[NodeModel], work: MeanWork, open_requests: float, portion: float) -> list[float]:
    """Hand out `open_requests` in small portions, each to the node whose iteration is shortest then."""
    given_out = [0] * len(models)
    queue = [(seconds(model, 0, work), 0.0, i) for i, model in enumerate(models)]
    heapq.heapify(queue)
    for _ in range(round(open_requests / portion)):
        if not queue:
            break
        _, _, i = heapq.heappop(queue)
        given_out[i] += 1
        batch = given_out[i] * portion
        most = at_once(models[i], work)
        if batch + portion <= most + 1e-9:
            heapq.heappush(queue, (seconds(models[i], batch, work), batch / most, i))
    return [count * portion for count in given_out]


def decode_rate(models: list[NodeModel], batches: list[float], work: MeanWork) -> float:
    """Σμ_D by equation 4."""
    pairs = zip(models, batches, strict=True)
    return sum(batch / (work.decode_iterations * seconds(model, batch, work)) for model, batch in pairs)


def test_equation_3_prefill_rate_is_one_over_the_time_of_the_mean_prompt() -> None:
    service_s = 0.5 * 50 / 200 + 0.01 * 50 + 1e-5 * 6275 + 0.002 * 40 + 0.0003 * 100
    assert NODE.prefill_s(WORK) == pytest.approx(service_s)
    assert throughput({"a": NODE, "b": NODE}, {"a": P, "b": P}, WORK, 9).prefill == pytest.approx(2 / service_s)


def test_equation_4_decode_rate_is_the_batch_over_the_time_of_one_request() -> None:
    iteration_s = 0.01 + 0.02 * (1 - 0.75**3) + 3 * 0.001 + 3 * 160 * 1e-6
    rate = throughput({"a": NODE, "b": NODE}, {"a": D, "b": D}, WORK, open_requests=6).decode
    assert rate == pytest.approx(2 * 3 / (20 * iteration_s))


def test_below_one_request_an_iteration_takes_as_long_as_for_one() -> None:
    iteration_s = 0.01 + 0.02 * 0.25 + 0.001 + 160 * 1e-6
    assert throughput({"a": NODE}, {"a": D}, WORK, 0.25).decode == pytest.approx(0.25 / (20 * iteration_s))


def test_no_more_requests_decode_than_there_are_slots() -> None:
    at_slots = throughput({"a": NODE}, {"a": D}, WORK, 8)
    assert throughput({"a": NODE}, {"a": D}, WORK, 1000) == at_slots


def test_speculation_feeds_more_tokens_and_reads_more_experts() -> None:
    speculating = NodeModel(PREFILL, DECODE, 200, 8, tokens_per_request=2.0)
    iteration_s = 0.01 + 0.02 * (1 - 0.75**6) + 3 * 0.001 + 3 * 160 * 1e-6
    assert throughput({"a": speculating}, {"a": D}, WORK, 3).decode == pytest.approx(3 / (20 * iteration_s))


def test_equation_5_the_slower_phase_limits() -> None:
    assert Throughput(prefill=2.0, decode=3.0).total == 2.0
    assert Throughput(prefill=4.0, decode=3.0).total == 3.0


def test_only_nodes_of_one_phase_count() -> None:
    models = dict.fromkeys("abcd", NODE)
    with_others = throughput(models, {"a": P, "b": D, "c": M, "d": X}, WORK, 4)
    assert with_others == throughput(models, {"a": P, "b": D}, WORK, 4)
    assert throughput(models, {"c": M, "d": X}, WORK, 4) == Throughput(0.0, 0.0)


@given(models=FLEETS, work=WORKS, open_requests=st.floats(0, 400))
def test_requests_are_spread_so_that_iterations_take_equally_long(
    models: list[NodeModel], work: MeanWork, open_requests: float
) -> None:
    batches = spread(models, work, open_requests)
    slots = [at_once(model, work) for model in models]
    assert sum(batches) == pytest.approx(min(open_requests, sum(slots)), rel=1e-9, abs=1e-9)
    assert all(-1e-9 <= batch <= most + 1e-9 for batch, most in zip(batches, slots, strict=True))
    times_s = [seconds(model, batch, work) for model, batch in zip(models, batches, strict=True)]
    busy_s = [t for t, batch in zip(times_s, batches, strict=True) if batch > 1e-6]
    with_room_s = [t for t, batch, most in zip(times_s, batches, slots, strict=True) if batch < most * (1 - 1e-6)]
    if busy_s and with_room_s:
        # Nobody waits longer than at a node that has room for more.
        assert max(busy_s) <= min(with_room_s) * (1 + 1e-6)


@given(models=st.lists(MODELS, min_size=1, max_size=3), work=WORKS, tenths=st.integers(1, 600))
def test_rates_are_those_of_handing_requests_out_bit_by_bit(
    models: list[NodeModel], work: MeanWork, tenths: int
) -> None:
    batches = naive_spread(models, work, tenths / 10, portion=0.02)
    kinds = Kinds(models)
    rate = kinds.decode_rates(kinds.count(models)[np.newaxis], work, tenths / 10)[0]
    assert rate == pytest.approx(decode_rate(models, batches, work), rel=0.02)


@given(models=FLEETS, work=WORKS, open_requests=st.floats(0.1, 400), data=st.data())
def test_a_node_more_never_lowers_throughput(
    models: list[NodeModel], work: MeanWork, open_requests: float, data: st.DataObject
) -> None:
    roles = {f"n{i}": data.draw(st.sampled_from([P, D])) for i in range(len(models))}
    by_id = {f"n{i}": model for i, model in enumerate(models)}
    like = data.draw(st.sampled_from(sorted(by_id)))
    before = throughput(by_id, roles, work, open_requests)
    for role in (P, D):
        after = throughput(by_id | {"new": by_id[like]}, roles | {"new": role}, work, open_requests)
        assert after.total >= before.total * (1 - 1e-9)
        assert after.prefill >= before.prefill * (1 - 1e-9)
        assert after.decode >= before.decode * (1 - 1e-9)


@given(models=FLEETS, work=WORKS, open_requests=st.floats(0.1, 400), more=st.floats(0, 100))
def test_more_open_requests_never_lower_the_decode_rate(
    models: list[NodeModel], work: MeanWork, open_requests: float, more: float
) -> None:
    kinds = Kinds(models)
    row = kinds.count(models)[np.newaxis]
    fewer = kinds.decode_rates(row, work, open_requests)[0]
    assert kinds.decode_rates(row, work, open_requests + more)[0] >= fewer * (1 - 1e-9)


@given(models=st.lists(MODELS, min_size=2, max_size=4), work=WORKS, open_requests=st.floats(0.1, 400), data=st.data())
def test_rows_are_computed_together_as_they_are_alone(
    models: list[NodeModel], work: MeanWork, open_requests: float, data: st.DataObject
) -> None:
    kinds = Kinds(models)
    count = st.lists(st.integers(0, 5), min_size=len(kinds.models), max_size=len(kinds.models))
    rows = np.array(data.draw(st.lists(count, min_size=1, max_size=5)))
    together = kinds.decode_rates(rows, work, open_requests)
    alone = [kinds.decode_rates(row[np.newaxis], work, open_requests)[0] for row in rows]
    assert together == pytest.approx(alone, rel=1e-9)


def test_a_fast_node_takes_more_of_the_requests() -> None:
    slow, fast = spread([node_model(), node_model(decode=2.0)], mean_work(), 20)
    assert fast > 2 * slow


def test_a_node_decodes_no_more_requests_than_have_room() -> None:
    """WORK's contexts have 160 tokens: memory for four of them is like four slots, for none like one."""
    nodes = np.array([[3]])
    for tokens, slots in ((640, 4), (100, 1), (16_000, 8)):
        rate, like = (
            Kinds([model]).decode_rates(nodes, WORK, 100.0)
            for model in (replace(NODE, decode_tokens=tokens), replace(NODE, decode_slots=slots))
        )
        assert rate == pytest.approx(like)
    four = replace(NODE, decode_tokens=640)
    assert spread([NODE, four], WORK, 12) == pytest.approx([8, 4])


def test_work_and_models_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="query_key_pairs"):
        MeanWork(1, math.nan, 0, 0, 1)
    with pytest.raises(ValueError, match="cached_tokens"):
        MeanWork(1, 1, -1, 0, 1)
    with pytest.raises(ValueError, match="decode_slots"):
        NodeModel(PREFILL, DECODE, 200, 0)
    with pytest.raises(ValueError, match="decode_tokens"):
        NodeModel(PREFILL, DECODE, 200, 1, decode_tokens=0)
    with pytest.raises(ValueError, match="prefill iteration"):
        NodeModel(PrefillCoefficients(0, 0, 0), DECODE, 200, 1)
    with pytest.raises(ValueError, match="decode iteration"):
        NodeModel(PREFILL, DecodeCoefficients(0, 0, 0), 200, 1)


def test_work_without_a_phase_has_no_throughput() -> None:
    for nothing in (MeanWork(0, 0, 9, 0, 5), MeanWork(5, 9, 9, 0, 0)):
        assert not nothing.asks_both_phases
        with pytest.raises(ValueError, match="both phases"):
            throughput({"a": NODE, "b": NODE}, {"a": P, "b": D}, nothing, 3)
