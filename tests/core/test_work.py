"""Work of requests and their service time (paper, section 4.2)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evolving.core.timemodel import PrefillCoefficients
from evolving.core.work import PrefillWork, node_wait_s, query_key_pairs, queue_service_s, service_s, sum_work

WORK = st.builds(PrefillWork, st.integers(0, 5000), st.integers(0, 5000), st.just(0))
COEFFICIENTS = PrefillCoefficients(c0_s=0.5, c1_s=0.01, c2_s=1e-5, c3_s=0.002, c4_s=0.0003)


@given(uncached=st.integers(0, 40), cached=st.integers(0, 40))
def test_pairs_are_what_causal_attention_visits(uncached: int, cached: int) -> None:
    visited = sum(1 for query in range(cached, cached + uncached) for _key in range(query + 1))
    assert query_key_pairs(uncached, cached) == visited


@given(parts=st.lists(st.integers(1, 500), min_size=1, max_size=6), cached=st.integers(0, 500))
def test_chunks_of_a_prompt_visit_as_many_pairs_as_the_whole(parts: list[int], cached: int) -> None:
    done, pairs = cached, 0.0
    for part in parts:
        pairs += query_key_pairs(part, done)
        done += part
    assert pairs == query_key_pairs(sum(parts), cached)


def test_pairs_are_summed_per_request_not_from_sums() -> None:
    works = (PrefillWork(10, 100), PrefillWork(1000))
    sums = sum_work(works)
    assert sums.query_key_pairs == works[0].query_key_pairs + works[1].query_key_pairs
    assert sums.query_key_pairs != query_key_pairs(1010, 100)


def test_service_charges_the_fixed_part_by_the_share_of_an_iteration() -> None:
    work = PrefillWork(uncached_tokens=50, cached_tokens=100, restored_tokens=40)
    expected = 0.5 * 50 / 200 + 0.01 * 50 + 1e-5 * (50 * 100 + 50 * 51 / 2) + 0.002 * 40 + 0.0003 * 100
    assert service_s(work, COEFFICIENTS, new_tokens_per_iteration=200) == pytest.approx(expected)


def test_a_short_queue_pays_one_whole_iteration() -> None:
    work = PrefillWork(1)
    single = queue_service_s((work,), COEFFICIENTS, 200)
    assert single == pytest.approx(0.5 + 0.01 + 1e-5)
    assert queue_service_s((), COEFFICIENTS, 200) == 0.0
    assert queue_service_s((work, work), COEFFICIENTS, 200) < 2 * single, "short requests share an iteration"


@given(works=st.lists(WORK, max_size=8))
def test_a_long_queue_is_the_sum_of_its_services(works: list[PrefillWork]) -> None:
    total = sum(work.uncached_tokens for work in works)
    one_by_one = sum(service_s(work, COEFFICIENTS, 100) for work in works)
    if total >= 100:
        assert queue_service_s(works, COEFFICIENTS, 100) == pytest.approx(one_by_one)
    else:
        assert queue_service_s(works, COEFFICIENTS, 100) >= one_by_one


def test_the_wait_is_the_rest_of_the_batch_and_the_queue() -> None:
    running, queued = (PrefillWork(64, 448),), (PrefillWork(300), PrefillWork(20, 280, 280))
    # What the running one reuses was read, and restored, before its first token.
    rest = 0.5 + 0.01 * 64 + 1e-5 * query_key_pairs(64, 448)
    expected = rest + queue_service_s(queued, COEFFICIENTS, 256)
    assert node_wait_s(running, queued, COEFFICIENTS, 256) == pytest.approx(expected)
    # While a batch decodes, one of its iterations goes with each of prefill.
    beside_s = 384 / 256 * 0.2
    assert node_wait_s(running, queued, COEFFICIENTS, 256, 0.2) == pytest.approx(expected + beside_s)
    assert node_wait_s((), queued[1:], COEFFICIENTS, 256, 0.2) == pytest.approx(
        queue_service_s(queued[1:], COEFFICIENTS, 256) + 0.2
    )
    assert node_wait_s((), (), COEFFICIENTS, 256, 0.2) == 0.0


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        PrefillWork(-1)
    with pytest.raises(ValueError, match="positive"):
        service_s(PrefillWork(1), COEFFICIENTS, 0)
    with pytest.raises(ValueError, match="positive"):
        queue_service_s((), COEFFICIENTS, -1)
