"""The figures and bars of bench-switch say what was measured."""

from __future__ import annotations

import math
from typing import Any

import pytest
from bench.switch_arm import NODES, START, turns_of_roles
from bench.switch_figures import Answer, Seen, Switch, bars, reuse_figures, served_s, switch_figures
from hypothesis import given
from hypothesis import strategies as st

ROW = {"switches": 50, "waiting_least": 1, "seconds_p50": 0.4, "seconds_max": 3.0, "failed_requests": 0,
       "lost_reuse": 0.003, "restarted": []}  # fmt: skip


def answer(first_s: float, second_s: float, prefill: str = "a", decode: str = "b", **more: Any) -> Answer:
    return Answer(0.0, first_s, second_s, more.pop("prefill_s", 0.0), prefill, decode, 100, **more)


def missed(quick: bool = False, upstream: int | None = None, engine: str = "mock", **row: Any) -> list[str]:
    result: dict[str, Any] = {"quick": quick, "engines": [{"engine": engine, **ROW, **row}]}
    if upstream is not None:
        result["upstream"] = {"switches": upstream}
    return [bar.name for bar in bars(result) if not bar.met]


def test_a_prefill_role_is_served_when_its_node_takes_a_request() -> None:
    answers = [answer(9.0, 9.5, "b"), answer(12.0, 12.1, "a"), answer(13.0, 13.1, "b", prefill_s=1.0)]
    assert served_s(Switch("b", "prefill", 10.0, 1), answers) == 2.0


def test_a_decode_role_is_served_by_a_request_that_was_taken_after_the_switch() -> None:
    """Who decodes is chosen when a request is taken: one taken before was sent to the node in an earlier role."""
    switch = Switch("b", "decode", 10.0, 1)
    before, elsewhere, after = answer(11.0, 12.0, prefill_s=2.0), answer(11.0, 11.5, "b", "c"), answer(11.0, 13.0)
    assert served_s(switch, [before, elsewhere]) == math.inf
    assert served_s(switch, [before, elsewhere, after]) == 3.0


def test_a_request_that_was_moved_says_nothing() -> None:
    """Its first tokens may come from another node than the one it ended on."""
    assert served_s(Switch("a", "prefill", 10.0, 1), [answer(11.0, 12.0, moved=True)]) == math.inf


def test_a_node_that_had_nothing_left_of_the_role_tells_when_it_serves_it() -> None:
    switch, answers = Switch("b", "decode", 10.0, 1), [answer(11.0, 13.0)]
    serves = [Seen(10.1, prefilling=1), Seen(10.2, reserved=1), Seen(10.5, decoding=1)]
    assert served_s(switch, answers, [Seen(9.9, prefilling=2, queued=1), *serves]) == 0.5
    assert served_s(switch, answers, [Seen(9.9, decoding=1), *serves]) == 3.0
    assert served_s(switch, answers, [Seen(9.9, reserved=1), *serves]) == 3.0
    assert served_s(switch, answers, serves) == 3.0


def test_a_role_that_was_never_served_is_no_figure() -> None:
    figures = switch_figures([Switch("a", "prefill", 1.0, 1), Switch("b", "prefill", 1.0, 1)], [answer(2.0, 3.0)], {})
    assert figures["seconds_max"] == math.inf
    assert "seconds_p50_to_decode" not in figures
    assert "each role was served" in " ".join(missed(seconds_max=math.inf))


def test_reuse_is_a_share_of_prompt_tokens() -> None:
    answers = [answer(1.0, 2.0, ideal_tokens=64, lost_by={"routing": 16, "switch": 0}), answer(1.0, 2.0)]
    figures = reuse_figures(answers)
    assert (figures["lost_reuse"], figures["lost_by"], figures["reusable"]) == (0.08, {"routing": 0.08}, 0.32)
    assert reuse_figures([])["lost_reuse"] == 0.0


def test_figures_that_keep_every_bar() -> None:
    assert missed(upstream=30) == []
    assert missed(quick=True, upstream=2, switches=4) == []
    assert missed(engine="sglang", seconds_p50=0.99) == []


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"switches": 49}, "mock: switches"),
        ({"waiting_least": 0}, "mock: one waits at each"),
        ({"seconds_p50": 0.5}, "mock: median seconds"),
        ({"engine": "sglang", "seconds_p50": 1.0}, "sglang: median seconds"),
        ({"failed_requests": 1}, "mock: failed requests"),
        ({"lost_reuse": 0.0031}, "mock: lost reuse"),
        ({"restarted": ["node-a"]}, "mock: restarted"),
        ({"upstream": 29}, "upstream: switches measured"),
    ],
)
def test_a_bar_that_is_missed_is_named(row: dict[str, Any], name: str) -> None:
    assert missed(**row) == [name]


@given(st.integers(1, 60))
def test_no_phase_is_ever_without_a_node(switches: int) -> None:
    roles, switched, turns = dict(START), set[str](), turns_of_roles()
    for _ in range(switches):
        node, phase = next(turns)
        assert roles[node] != phase
        roles[node] = phase
        switched.add(node)
        assert {"prefill", "decode"} == set(roles.values())
    assert switched == set(NODES) or switches < len(NODES)
