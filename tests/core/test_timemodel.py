"""Equations 1 and 2 of the paper."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients, PrefillSums, mixed_iteration_s

PREFILL = PrefillCoefficients(c0_s=1.0, c1_s=0.1, c2_s=0.01, c3_s=0.001, c4_s=0.0001)
SUMS = PrefillSums(uncached_tokens=3, query_key_pairs=5, restored_tokens=7, cached_tokens=11)


def test_equation_1_weighs_each_sum_by_its_coefficient() -> None:
    assert PREFILL.prefill_iteration_s(SUMS) == pytest.approx(1.0 + 0.3 + 0.05 + 0.007 + 0.0011)
    assert PREFILL.marginal_s(SUMS) == pytest.approx(PREFILL.prefill_iteration_s(SUMS) - 1.0)


def test_equation_2_weighs_experts_requests_and_context() -> None:
    decode = DecodeCoefficients(d0_s=1.0, d1_s=10.0, d2_s=0.1, d3_s=0.001, experts_per_token=1, experts=4)
    share = 1 - 0.75**2
    assert decode.expert_share(2) == pytest.approx(share)
    assert decode.decode_iteration_s(2, context_tokens=500) == pytest.approx(1.0 + 10.0 * share + 0.2 + 0.5)


def test_speculation_reads_the_experts_of_every_fed_token() -> None:
    decode = DecodeCoefficients(d0_s=0, d1_s=1.0, d2_s=0, experts_per_token=1, experts=4)
    assert decode.expert_share(2, tokens_per_request=3) == pytest.approx(decode.expert_share(6))


def test_a_dense_model_has_no_expert_term() -> None:
    decode = DecodeCoefficients(d0_s=1.0, d1_s=9.0, d2_s=0.5)
    assert decode.decode_iteration_s(4) == pytest.approx(3.0)


def test_a_mixed_iteration_pays_the_decode_part_s_fixed_cost_once() -> None:
    decode = DecodeCoefficients(d0_s=2.0, d1_s=0, d2_s=0.5)
    expected = PREFILL.prefill_iteration_s(SUMS) + 0.5 * 3
    assert mixed_iteration_s(PREFILL, SUMS, decode, batch=3, context_tokens=0) == pytest.approx(expected)


@given(batch=st.floats(0, 500), more=st.floats(0, 500))
def test_a_larger_batch_is_never_faster_and_phi_stays_a_share(batch: float, more: float) -> None:
    decode = DecodeCoefficients(d0_s=0.01, d1_s=0.02, d2_s=0.001, d3_s=1e-7, experts_per_token=8, experts=256)
    assert 0 <= decode.expert_share(batch) <= 1
    assert decode.decode_iteration_s(batch + more) >= decode.decode_iteration_s(batch)


@pytest.mark.parametrize("bad", [-1e-9, math.nan, math.inf])
def test_coefficients_must_be_finite_and_not_negative(bad: float) -> None:
    with pytest.raises(ValueError, match="c2_s"):
        PrefillCoefficients(c0_s=0, c1_s=0, c2_s=bad)
    with pytest.raises(ValueError, match="d3_s"):
        DecodeCoefficients(d0_s=0, d1_s=0, d2_s=0, d3_s=bad)


def test_a_token_cannot_use_more_experts_than_there_are() -> None:
    with pytest.raises(ValueError, match="experts_per_token"):
        DecodeCoefficients(d0_s=0, d1_s=0, d2_s=0, experts_per_token=9, experts=8)
