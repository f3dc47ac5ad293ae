"""Turns to read from peers: bounded, most urgent first, no more bytes than the bandwidth allows (§4.4)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evolving.core.config import FetchConfig
from evolving.core.fetching import FetchTurns, Rank

asks = st.lists(
    st.tuples(st.floats(0.0, 2.0), st.tuples(st.integers(-3, 3), st.integers(0, 50)), st.integers(1, 1000)), max_size=40
)
configs = st.builds(
    FetchConfig,
    readers=st.integers(1, 5),
    chunk_blocks=st.integers(1, 64),
    bytes_per_s=st.one_of(st.just(math.inf), st.floats(50.0, 5000.0)),
)


@given(configs, asks, st.integers(1, 7))
def test_turns_keep_their_bounds_and_everybody_gets_one(
    config: FetchConfig, asks: list[tuple[float, Rank, int]], hold: int
) -> None:
    """Each turn lasts until `hold` later events; time passes between them; at the end everyone has had a turn."""
    turns: FetchTurns[int] = FetchTurns(config)
    ranks = {key: rank for key, (_, rank, _) in enumerate(asks)}
    sizes = {key: size for key, (_, _, size) in enumerate(asks)}
    now_s, waiting, reading, granted = 0.0, set[int](), list[int](), list[tuple[float, int]]()

    def grant() -> None:
        before = set(waiting)
        for key in turns.grant(now_s):
            assert all(ranks[key] <= ranks[other] for other in before), "the most urgent goes first"
            before.discard(key)
            waiting.discard(key)
            reading.append(key)
            granted.append((now_s, key))
        assert turns.reading == len(reading) <= config.readers

    for key, (delay_s, rank, size_bytes) in enumerate(asks):
        now_s += delay_s
        turns.ask(key, rank, size_bytes)
        waiting.add(key)
        grant()
        if len(reading) >= hold:
            turns.end(reading.pop(0))
            grant()
    while waiting or reading:
        if reading:
            turns.end(reading.pop(0))
        elif (due_s := turns.next_wakeup_s(now_s)) is not None:
            now_s = due_s
        grant()
    assert sorted(key for _, key in granted) == list(range(len(asks)))
    # Over any stretch of turns the bytes of all but the last fit the bandwidth.
    for first in range(len(granted)):
        for last in range(first + 1, len(granted)):
            total = sum(sizes[key] for _, key in granted[first:last])
            room = (granted[last][0] - granted[first][0]) * config.bytes_per_s
            assert math.isinf(config.bytes_per_s) or total <= room * (1 + 1e-9) + 1e-6


def test_a_later_but_more_urgent_leg_goes_before_those_that_wait() -> None:
    """Priority overtakes between chunks."""
    turns: FetchTurns[str] = FetchTurns(FetchConfig(readers=1))
    turns.ask("first", (0, 1), 1)
    assert turns.grant(0.0) == ["first"]
    turns.ask("second", (0, 2), 1)
    turns.ask("urgent", (-5, 3), 1)
    assert turns.grant(0.0) == []
    turns.end("first")
    assert turns.grant(0.0) == ["urgent"]


def test_whoever_stops_waiting_or_reading_frees_the_place() -> None:
    """`end` serves both, and repeats do nothing."""
    turns: FetchTurns[str] = FetchTurns(FetchConfig(readers=1))
    turns.ask("a", (0, 1), 1)
    turns.ask("b", (0, 2), 1)
    turns.grant(0.0)
    turns.end("b")
    turns.end("a")
    turns.end("a")
    assert turns.grant(0.0) == []
    assert turns.reading == 0
    assert turns.next_wakeup_s(0.0) is None


def test_it_says_when_bandwidth_frees_a_turn() -> None:
    """100 bytes at 10 bytes/s keep the next turn back for 10 s."""
    turns: FetchTurns[str] = FetchTurns(FetchConfig(readers=2, bytes_per_s=10.0))
    turns.ask("a", (0, 1), 100)
    turns.ask("b", (0, 2), 1)
    assert turns.grant(3.0) == ["a"]
    assert turns.next_wakeup_s(3.0) == 13.0
    assert turns.grant(12.9) == []
    assert turns.grant(13.0) == ["b"]


@pytest.mark.parametrize("values", [{"readers": 0}, {"chunk_blocks": 0}, {"bytes_per_s": 0.0}, {"suspect_s": -1.0}])
def test_bounds_out_of_range_are_refused(values: dict[str, float]) -> None:
    """A bound of nothing would hold every fetch for ever."""
    with pytest.raises(ValueError, match="must be"):
        FetchConfig(**values)  # type: ignore[arg-type]
