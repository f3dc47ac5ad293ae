"""What bench-fit makes of its samples."""

from __future__ import annotations

import pytest
from bench.fit_errors import Sample, TotalLength, bars, mean_error, repeat_noise

from evolving.core.iterations import IterationSums, IterationWindow
from evolving.core.timemodel import PrefillSums


def sample(kind: str, setting: str, busy_s: float, iterations: int = 1, lengths: tuple[int, ...] = ()) -> Sample:
    return Sample(kind, setting, IterationSums(iterations, busy_s), lengths)


def test_errors_are_means_by_kind_relative_to_what_was_measured() -> None:
    samples = [sample("prefill_single", "a", 2.0), sample("prefill_single", "b", 1.0), sample("decode_batch", "c", 4.0)]
    errors = mean_error(samples, [1.0, 1.1, 5.0])
    assert errors == pytest.approx(
        {"prefill_single": 0.3, "prefill_batch": 0.0, "decode_single": 0.0, "decode_batch": 0.25}
    )


def test_repeat_noise_compares_a_setting_with_itself_alone_and_per_iteration() -> None:
    quiet = [sample("decode_single", "a", 1.0, 10), sample("decode_single", "b", 5.0, 10)]
    assert set(repeat_noise(quiet).values()) == {0.0}, "nothing was repeated"
    assert repeat_noise([*quiet, sample("decode_single", "a", 2.0, 20)])["decode_single"] == 0.0
    noise = repeat_noise([*quiet, sample("decode_single", "a", 2.0, 10)])
    assert noise["decode_single"] == pytest.approx((0.5 + 1.0) / 2)


def test_a_model_of_total_length_fits_what_goes_by_total_length_and_nothing_else() -> None:
    def windows(cached_s: float) -> list[IterationWindow]:
        works = [(new, cached) for new in (10, 80, 300) for cached in (0, 500, 2000)]
        return [
            IterationWindow(IterationSums(1, 0.01 + 1e-3 * new + cached_s * cached, PrefillSums(new, 0, 0, cached)))
            for new, cached in works
        ]

    def samples(cached_s: float) -> list[Sample]:
        return [
            Sample("prefill_single", "", each.prefill, (int(sum_of.uncached_tokens + sum_of.cached_tokens),))
            for each in windows(cached_s)
            for sum_of in [each.prefill.prefill]
        ]

    assert TotalLength.of_windows(windows(1e-3)).error(samples(1e-3)) < 1e-6
    assert TotalLength.of_samples(samples(1e-3)).error(samples(1e-3)) < 1e-6
    assert TotalLength.of_windows(windows(0.0)).error(samples(0.0)) > 0.3
    assert TotalLength.of_samples(samples(0.0)).error(samples(0.0)) > 0.3


def test_the_bar_grows_with_the_noise_and_total_length_has_to_err_several_times_as_much() -> None:
    kinds = ("prefill_single", "prefill_batch", "decode_single", "decode_batch")
    noise = dict(zip(kinds, (0.0, 0.1, 0.07, 0.081), strict=True))
    by_length = dict.fromkeys(("prefill_total_length_model", "prefill_total_length_model_at_best"), 0.36)
    result = {**dict.fromkeys(kinds, 0.12), **by_length, "repeat_noise": noise}
    assert [bar.met for bar in bars(result)] == [False, True, False, True, True]
    assert not any(bars({**result, name: 0.35})[-1].met for name in by_length), "whichever way it is fitted"
    assert str(bars(result)[0]) == "prefill_single 0.120, at most 0.100: MISSED"
