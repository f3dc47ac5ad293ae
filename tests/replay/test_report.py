"""What is made of finished requests: percentiles, and at which step reuse was lost."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evolving_client import Cached, Finished, FinishReason, LossCause, Overloaded, Reuse, Timings, Usage
from evolving_replay.report import CAUSES, Latency, NodeLoad
from evolving_replay.tally import Answered, Tally, lost

COUNTS = st.integers(0, 1000)


def finished(
    *,
    cached: int = 0,
    pool: int = 0,
    planned: int = 0,
    loss: LossCause | None = None,
    prompt: int = 1001,
    nodes: tuple[str, str] = ("p", "d"),
    fetch_s: float = 0.0,
    hidden_s: float = 0.0,
) -> Finished:
    """A result as the client gives it; a third of what was reused came from a peer."""
    peer = cached // 3
    return Finished(
        request_id="r",
        version=1,
        reason=FinishReason.LENGTH,
        output_token_ids=(1, 2),
        text="",
        prefill_node_id=nodes[0],
        decode_node_id=nodes[1],
        cached=Cached(0, cached - peer, peer),
        reuse=Reuse(pool, planned, loss),
        usage=Usage(prompt, cached, prompt - cached, 2),
        timings=Timings(0.0, fetch_s, hidden_s, 0.0, 0.0, 0.0, 0.0, 0.0),
        attempts=1,
        reconnects=2,
        reusable_blocks=0,
    )


@given(st.lists(st.floats(0, 1000), min_size=1))
def test_percentiles_are_numpy_s(seconds: list[float]) -> None:
    latency = Latency.of(seconds)
    ordered = sorted(seconds)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (place - below) * (ordered[above] - ordered[below])

    assert [latency.p50_s, latency.p95_s, latency.p99_s] == pytest.approx([at(0.5), at(0.95), at(0.99)])
    assert [latency.p50_s, latency.p95_s, latency.p99_s] == pytest.approx(np.percentile(seconds, [50, 95, 99]))
    assert latency.mean_s == pytest.approx(sum(seconds) / len(seconds))


@given(COUNTS, COUNTS, COUNTS, COUNTS, st.sampled_from([None, *LossCause]))
def test_the_steps_sum_to_what_was_lost(
    ideal: int, pool: int, planned: int, cached: int, loss: LossCause | None
) -> None:
    """Whatever a gateway says, also that it reused more than it knew of."""
    losses = lost(ideal, finished(cached=cached, pool=pool, planned=planned, loss=loss))
    assert tuple(losses.by) == CAUSES
    assert min(losses.by.values()) >= 0
    assert sum(losses.by.values()) == max(0, ideal - cached)
    assert cached == ideal - sum(losses.by.values()) + losses.beyond
    gone = {None: "eviction", LossCause.SWITCH: "switch", LossCause.NODE: "node"}
    assert {"eviction", "switch", "node"} - {gone[loss]} <= {cause for cause in CAUSES if not losses.by[cause]}


@pytest.mark.parametrize(
    ("pool", "planned", "cached", "loss", "expected"),
    [
        (600, 500, 400, None, {"eviction": 400, "routing": 100, "fetch_failed": 100}),
        (600, 600, 600, LossCause.SWITCH, {"switch": 400}),
        (600, 600, 500, LossCause.NODE, {"node": 400, "fetch_failed": 100}),
        (1000, 0, 0, None, {"routing": 1000}),
        (1000, 1000, 0, LossCause.NODE, {"fetch_failed": 1000}),
        (0, 0, 1000, None, {}),
    ],
)
def test_each_step_has_its_name(
    pool: int, planned: int, cached: int, loss: LossCause | None, expected: dict[str, int]
) -> None:
    losses = lost(1000, finished(pool=pool, planned=planned, cached=cached, loss=loss))
    assert {cause: tokens for cause, tokens in losses.by.items() if tokens} == expected


def test_a_report_adds_up() -> None:
    tally = Tally(total_requests=8, total_sessions=1)
    tally.session_started()
    for result, ideal in [
        (finished(prompt=1000, pool=600, planned=600, cached=300, fetch_s=2.0, hidden_s=1.5), 600),
        (finished(prompt=3000, pool=900, planned=900, cached=900, nodes=("q", "d"), fetch_s=2.0, hidden_s=2.0), 1200),
        (finished(prompt=1000, pool=200, planned=200, cached=200, nodes=("p", "p")), 0),
    ]:
        tally.request_sent()
        tally.request_answered(
            Answered(0, 0, 0, sent_s=0.0, ttft_s=1.0, e2e_s=4.0, ideal_tokens=ideal, finished=result)
        )
    for error in (Overloaded("no", reason="QUEUE_FULL"), Overloaded("no", reason="QUEUE_FULL")):
        tally.request_sent()
        tally.request_failed(error)
    for _ in range(3):
        tally.request_sent()
    tally.request_left()
    tally.session_over(played=True)
    report = tally.report(complete=False, wall_s=2.0)

    assert (report.requests, report.failed, report.failures) == (3, 2, {"QUEUE_FULL": 2})
    assert report.unfinished == 8 - 3 - 2, "each one sent has an outcome: left in the middle, or running still, is one"
    assert (report.resent, report.moved, report.sessions) == (6, 3, 1)
    assert (report.prompt_tokens_per_s, report.output_tokens_per_s, report.requests_per_s) == (2500, 3, 1.5)
    assert report.hit_rate == pytest.approx(1400 / 5000)
    assert report.ideal_hit_rate == pytest.approx(1800 / 5000)
    assert report.lost_by == pytest.approx(
        {"eviction": 300 / 5000, "routing": 0, "switch": 0, "node": 0, "fetch_failed": 300 / 5000}
    )
    assert report.lost_reuse == pytest.approx(sum(report.lost_by.values()))
    assert report.hit_rate == pytest.approx(report.ideal_hit_rate - report.lost_reuse + report.beyond_ideal)
    assert sum(report.cached_by.values()) == pytest.approx(report.hit_rate)
    assert report.cached_by["peer_l2"] == pytest.approx((100 + 300 + 66) / 5000)
    assert report.hidden_share == pytest.approx(3.5 / 4.0)
    # p computed 700 + 800, q 2100; d prefilled nothing and doesn't count
    assert report.most_loaded_prefill == pytest.approx(2100 / ((1500 + 2100) / 2))
    assert (report.nodes["p"].prefills, report.nodes["p"].decodes, report.nodes["d"].decodes) == (2, 1, 2)
    assert (report.nodes["q"].computed_tokens, report.nodes["q"].cached_tokens) == (2100, 900)


def test_the_readme_explains_every_field() -> None:
    readme = (Path(__file__).parents[2] / "libs" / "replay" / "README.md").read_text()
    named = set(re.findall(r"`(\w+)`", readme))
    shown = Tally(total_requests=0, total_sessions=0).report(complete=True, wall_s=1.0).as_json()
    fields = {*shown, *shown["ttft"], *shown["lost_by"], *shown["cached_by"], *asdict(NodeLoad())}
    assert fields - named == set()


def test_a_report_of_nothing() -> None:
    report = Tally(total_requests=0, total_sessions=0).report(complete=False, wall_s=0.0)
    assert (report.requests_per_s, report.hit_rate, report.hidden_share, report.ttft.p99_s) == (0, 0, None, 0)
