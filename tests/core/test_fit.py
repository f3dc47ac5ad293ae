"""The fit of equations 1 and 2 to windows made from known coefficients (paper, section 4.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evolving.core.fit import (
    FitConfig,
    WindowError,
    decode_error,
    fit_decode,
    fit_prefill,
    has_drifted,
    prefill_error,
)
from evolving.core.iterations import COLD_ITERATIONS, IterationMeter, IterationWindow
from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients, PrefillSums
from evolving.core.work import PrefillWork, sum_work

Draw = np.random.Generator
Prefills = Callable[[Draw], list[PrefillWork]]
Decodes = Callable[[Draw], tuple[int, int]]  # requests, context tokens
EXPERTS, EXPERTS_PER_TOKEN = 64, 4
seeds = st.integers(0, 2**32 - 1)
shares = st.floats(0.05, 1.0)


def any_prompts(draw: Draw) -> list[PrefillWork]:
    """One iteration: one to four prompts, of which some reuse a prefix, some of that from host memory."""
    works = []
    for _ in range(draw.integers(1, 5)):
        cached = int(draw.integers(0, 4000)) * int(draw.integers(0, 2))
        works.append(PrefillWork(int(draw.integers(1, 700)), cached, int(cached * draw.random())))
    return works


def any_batch(draw: Draw) -> tuple[int, int]:
    requests = int(draw.integers(1, 33))
    return requests, int(draw.integers(10, 3000, requests).sum())


def windows_of(
    seed: int,
    prefill: PrefillCoefficients,
    decode: DecodeCoefficients,
    count: int = 80,
    noise: float = 0.0,
    prompts: Prefills = any_prompts,
    batch: Decodes = any_batch,
) -> list[IterationWindow]:
    """Windows of a few iterations of either kind; each takes what the coefficients say, off by about `noise`."""
    draw = np.random.default_rng(seed)
    meter = IterationMeter(decode.experts, decode.experts_per_token)
    for _ in range(COLD_ITERATIONS):
        meter.add(99.0, PrefillSums(1), requests=1, context_tokens=1)
    windows, before = [], meter.totals()
    for _ in range(count):
        for _ in range(draw.integers(1, 6)):
            work = sum_work(prompts(draw))
            requests, context = batch(draw)
            off = np.exp(noise * draw.standard_normal(3))
            meter.add(prefill.prefill_iteration_s(work) * off[0], work)
            meter.add(decode.decode_iteration_s(requests, context) * off[1], requests=requests, context_tokens=context)
            meter.add(77.0, work, requests=requests, context_tokens=context)  # both at once: no row
        windows.append(meter.totals().since(before))
        before = meter.totals()
    return windows


def prefill_of(parts: list[float]) -> PrefillCoefficients:
    """Coefficients whose terms are all a visible part of an iteration of `any_prompts`."""
    return PrefillCoefficients(*(part * unit for part, unit in zip(parts, (0.02, 5e-5, 3e-8, 2e-5, 1e-5), strict=True)))


def decode_of(parts: list[float], moe: bool) -> DecodeCoefficients:
    d0, d1, d2, d3 = (part * unit for part, unit in zip(parts, (0.02, 0.02, 1e-3, 1e-6), strict=True))
    return DecodeCoefficients(d0, d1 if moe else 0.0, d2, d3, *((EXPERTS_PER_TOKEN, EXPERTS) if moe else ()))


PREFILL, DECODE = prefill_of([0.5] * 5), decode_of([0.5] * 4, moe=False)


@settings(max_examples=40)
@given(seeds, st.lists(shares, min_size=5, max_size=5), st.lists(shares, min_size=4, max_size=4), st.booleans())
def test_known_coefficients_are_found_again(seed: int, first: list[float], second: list[float], moe: bool) -> None:
    prefill, decode = prefill_of(first), decode_of(second, moe)
    windows = windows_of(seed, prefill, decode)
    found, also = fit_prefill(windows), fit_decode(windows, *((EXPERTS, EXPERTS_PER_TOKEN) if moe else ()))
    assert found is not None
    assert also is not None
    assert astuple(found.coefficients) == pytest.approx(astuple(prefill), rel=1e-6)
    assert astuple(also.coefficients) == pytest.approx(astuple(decode), rel=1e-6)
    for fitted in (found, also):
        assert fitted.rows == len(windows)
        assert fitted.error_in_sample < 1e-9
        assert fitted.error_left_out < 1e-9
        assert not fitted.unidentified
        assert not fitted.dropped


@settings(max_examples=25)
@given(seeds, st.floats(0.02, 0.15))
def test_noisy_windows_are_told_to_within_their_noise(seed: int, noise: float) -> None:
    windows = windows_of(seed, PREFILL, DECODE, count=200, noise=noise)
    found, also = fit_prefill(windows), fit_decode(windows)
    assert found is not None
    assert also is not None
    truth = windows_of(seed + 1, PREFILL, DECODE, count=200)
    # Many rows see less of the noise than each of them has.
    assert prefill_error(found.coefficients, truth).mean_relative < noise / 2
    assert decode_error(also.coefficients, truth).mean_relative < noise / 2
    assert found.error_in_sample < noise
    assert found.error_in_sample <= found.error_left_out < 1.2 * noise


@settings(max_examples=25)
@given(seeds)
def test_where_no_bound_is_met_it_is_plain_least_squares_on_relative_errors(seed: int) -> None:
    windows = windows_of(seed, PREFILL, DECODE, noise=0.02)
    found = fit_prefill(windows, FitConfig(term_gain_least=0.0))
    assert found is not None
    kept = [place for place, name in enumerate(("c0", "c1", "c2", "c3", "c4")) if name not in found.dropped]
    sums = [window.prefill for window in windows]
    busy_s = np.array([each.busy_s for each in sums])
    rows = np.array([[each.iterations, *astuple(each.prefill)] for each in sums])[:, kept] / busy_s[:, None]
    naive, *_ = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)
    assert (naive > 0).all()
    assert np.array(astuple(found.coefficients))[kept] == pytest.approx(naive, rel=1e-6)


@settings(max_examples=40)
@given(seeds, st.booleans())
def test_coefficients_are_never_negative(seed: int, moe: bool) -> None:
    # Times that follow no model at all: DecodeCoefficients and PrefillCoefficients refuse negative values.
    windows = windows_of(seed, PREFILL, decode_of([0.5] * 4, moe), count=25, noise=2.0)
    assert fit_prefill(windows) is not None
    assert fit_decode(windows, *((EXPERTS, EXPERTS_PER_TOKEN) if moe else ())) is not None


def test_small_windows_count_as_much_as_large_ones() -> None:
    def prompts(draw: Draw) -> list[PrefillWork]:
        return [PrefillWork(int(draw.choice([5, 20, 2000, 4000])), 0)]

    prefill, small = PrefillCoefficients(0.01, 1e-4, 5e-8), PrefillSums(5, 15.0)
    expected_s = prefill.prefill_iteration_s(small)
    ours, unweighted = [], []
    for seed in range(10):
        windows = windows_of(seed, prefill, DECODE, count=150, noise=0.1, prompts=prompts)
        found = fit_prefill(windows)
        assert found is not None
        sums = [window.prefill for window in windows]
        columns = np.array([[each.iterations, *astuple(each.prefill)[:2]] for each in sums])
        plain, *_ = np.linalg.lstsq(columns, np.array([each.busy_s for each in sums]), rcond=None)
        ours.append(abs(found.coefficients.prefill_iteration_s(small) / expected_s - 1))
        unweighted.append(abs(plain @ [1, 5, 15.0] / expected_s - 1))
    assert max(ours) < 0.1
    assert np.mean(ours) < np.mean(unweighted) / 2, "unweighted least squares sees the large ones only"


@pytest.mark.parametrize("seed", range(5))
def test_optional_terms_stay_when_they_pay(seed: int) -> None:
    plain = windows_of(seed, prefill_of([0.5, 0.5, 0.5, 0, 0]), decode_of([0.5, 0, 0.5, 0], moe=True), noise=0.05)
    with_all = windows_of(seed, PREFILL, decode_of([0.5] * 4, moe=True), noise=0.05)
    found, also = fit_prefill(plain), fit_decode(plain, EXPERTS, EXPERTS_PER_TOKEN)
    assert found is not None
    assert also is not None
    assert found.dropped == ("c3", "c4")
    assert (found.coefficients.c3_s, found.coefficients.c4_s) == (0.0, 0.0)
    assert also.dropped == ("d1", "d3")
    kept, kept_too = fit_prefill(with_all), fit_decode(with_all, EXPERTS, EXPERTS_PER_TOKEN)
    assert kept is not None
    assert kept_too is not None
    assert "c4" not in kept.dropped
    assert "d3" not in kept_too.dropped


def test_what_was_never_seen_at_work_is_named() -> None:
    windows = windows_of(1, PREFILL, DECODE, prompts=lambda draw: [PrefillWork(int(draw.integers(1, 900)))])
    found = fit_prefill(windows)
    assert found is not None
    assert found.unidentified == ("c3", "c4")
    assert found.dropped == ("c3", "c4")


def test_what_always_comes_together_is_named() -> None:
    def one_size(draw: Draw) -> tuple[int, int]:
        return 8, int(draw.integers(1000, 9000))

    found = fit_decode(windows_of(2, PREFILL, DECODE, batch=one_size))
    assert found is not None
    assert found.unidentified == ("d0", "d2"), "the batch was always 8"

    def one_length(draw: Draw) -> tuple[int, int]:
        requests = int(draw.integers(1, 20))
        return requests, 500 * requests

    found = fit_decode(windows_of(3, PREFILL, DECODE, batch=one_length))
    assert found is not None
    assert found.unidentified == ("d2", "d3"), "contexts were always 500 tokens long"


def test_what_noise_hides_is_named() -> None:
    def nearly_one_size(draw: Draw) -> tuple[int, int]:
        return int(draw.integers(20, 22)), int(draw.integers(1000, 90_000))

    for noise, unidentified in ((0.0, ()), (0.2, ("d0", "d2"))):
        found = fit_decode(windows_of(4, PREFILL, DECODE, noise=noise, batch=nearly_one_size))
        assert found is not None
        assert found.unidentified == unidentified


def test_too_few_rows_are_not_fitted() -> None:
    windows = windows_of(5, PREFILL, DECODE, count=19)
    empty = [IterationWindow()] * 50
    assert fit_prefill([*windows, *empty]) is None
    assert fit_decode([*windows, *empty]) is None
    assert fit_prefill([*windows, *empty], config=FitConfig(rows_least=19)) is not None


def test_a_node_that_slowed_down_has_drifted() -> None:
    config = FitConfig()
    found = fit_prefill(windows_of(6, PREFILL, DECODE, noise=0.03))
    assert found is not None
    same = prefill_error(found.coefficients, windows_of(7, PREFILL, DECODE, noise=0.03))
    assert not has_drifted(same, found.error_left_out, config)
    slower = PrefillCoefficients(*(1.3 * value for value in astuple(PREFILL)))
    drifted = prefill_error(found.coefficients, windows_of(7, slower, DECODE, noise=0.03))
    assert drifted.mean_relative == pytest.approx(1 - 1 / 1.3, abs=0.02)
    assert has_drifted(drifted, found.error_left_out, config)
    assert not has_drifted(drifted, 0.2, config), "a fit that errs much is not bettered by another"
    assert not has_drifted(WindowError(config.drift_rows_least - 1, 1.0), 0.0, config)
    assert prefill_error(found.coefficients, []) == decode_error(DECODE, []) == WindowError(0, 0.0)


@pytest.mark.parametrize(
    "wrong", [{"rows_least": 1}, {"folds": 1}, {"drift_error_max": -0.1}, {"term_gain_least": float("nan")}]
)
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        FitConfig(**wrong)  # type: ignore[arg-type]
