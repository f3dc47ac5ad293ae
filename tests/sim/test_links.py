"""Transfers share the ways they take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evolving_sim.events import EventHeap, Priority
from evolving_sim.links import Links, Transfer

NODES = ("a", "b", "c")


class Net:
    """Three nodes, 10 bytes/s out of each and 8 into it."""

    def __init__(self, fixed_s: float = 0.0) -> None:
        self.events = EventHeap()
        self.links = Links(
            self.events, dict.fromkeys(NODES, 10.0), dict.fromkeys(NODES, 8.0), dict.fromkeys(NODES, fixed_s)
        )
        self.arrived_s: dict[str, float] = {}
        self.events.after_each = self.links.check_invariants

    def send(self, name: str, at_s: float, source: str, target: str, size: float) -> Callable[[], Transfer]:
        sent: list[Transfer] = []

        def begin() -> None:
            sent.append(self.links.send(source, target, size, lambda: self.arrived_s.update({name: self.events.now_s})))

        self.events.at(at_s, Priority.ARRIVAL, begin)
        return lambda: sent[0]


def test_one_alone_goes_at_the_slower_of_its_ways_and_takes_the_fixed_time_too() -> None:
    net = Net(fixed_s=0.5)
    net.send("x", 0.0, "a", "b", 16.0)
    net.events.run_until(10.0)
    assert net.arrived_s == {"x": pytest.approx(2.5)}


def test_two_into_one_node_share_its_way_in() -> None:
    net = Net()
    net.send("x", 0.0, "a", "c", 16.0)
    net.send("y", 1.0, "b", "c", 16.0)
    net.events.run_until(10.0)
    # x: 8 bytes alone, then 4/s; y: 8 bytes by then, then 8/s.
    assert net.arrived_s == {"x": pytest.approx(3.0), "y": pytest.approx(4.0)}


def test_two_out_of_one_node_share_its_way_out() -> None:
    net = Net()
    net.send("x", 0.0, "a", "b", 10.0)
    net.send("y", 0.0, "a", "c", 20.0)
    net.events.run_until(10.0)
    assert net.arrived_s == {"x": pytest.approx(2.0), "y": pytest.approx(2.0 + 10.0 / 8.0)}


def test_what_is_cancelled_leaves_its_share_to_others() -> None:
    net = Net()
    other = net.send("x", 0.0, "a", "c", 80.0)
    net.send("y", 0.0, "b", "c", 16.0)
    net.events.run_until(2.0)
    net.links.cancel(other())
    net.links.cancel(other())
    net.events.run_until(20.0)
    assert net.arrived_s == {"y": pytest.approx(3.0)}


@given(
    st.lists(st.tuples(st.floats(0, 5), st.sampled_from(NODES), st.sampled_from(NODES), st.floats(0, 50)), max_size=12)
)
def test_all_arrives_and_no_way_carries_more_than_it_can(sends: list[tuple[float, str, str, float]]) -> None:
    net = Net()
    for number, (at_s, source, target, size) in enumerate(sends):
        net.send(str(number), at_s, source, target, size)
    net.events.run_until(1e4)
    assert len(net.arrived_s) == len(sends)
    for number, (at_s, _, _, size) in enumerate(sends):
        assert net.arrived_s[str(number)] >= at_s + size / 8.0 - 1e-9
    for node in NODES:
        into = [(at_s, size) for at_s, _, target, size in sends if target == node]
        if into:
            last_s = max(net.arrived_s[str(n)] for n, each in enumerate(sends) if each[2] == node)
            assert last_s >= min(at_s for at_s, _ in into) + sum(size for _, size in into) / 8.0 - 1e-6
