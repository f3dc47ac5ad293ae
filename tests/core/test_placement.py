"""Which nodes move: the fewest, and of unlike ones those that fit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from core.planning import MODELS, WORKS, mean_work, node_model
from hypothesis import given
from hypothesis import strategies as st

from evolving.core.placement import Placement, fewest_moves
from evolving.core.terms import Role
from evolving.core.throughput import Kinds, MeanWork, NodeModel, throughput
from evolving.core.timemodel import DecodeCoefficients

P, D = Role.PREFILL, Role.DECODE
SPEEDS = st.sampled_from([0.5, 0.8, 1.0, 1.3, 2.0])


def placements(
    roles: Mapping[str, Role], models: Mapping[str, NodeModel], work: MeanWork, open_requests: float
) -> list[Placement]:
    return fewest_moves(Kinds(models.values()), roles, models, work, open_requests)


def after(roles: Mapping[str, Role], placement: Placement) -> dict[str, Role]:
    return dict(roles) | dict(placement.moves)


def best_by_trying_all(
    roles: Mapping[str, Role], models: Mapping[str, NodeModel], prefills: int, work: MeanWork, open_requests: float
) -> float:
    """The largest Θ of any way to reach `prefills` prefill nodes with the fewest moves."""
    have = [node for node in roles if roles[node] is P]
    fewest = abs(prefills - len(have))
    found = 0.0
    for chosen in itertools.combinations(roles, prefills):
        way = {node: P if node in chosen else D for node in roles}
        if sum(way[node] is not roles[node] for node in roles) == fewest:
            found = max(found, throughput(models, way, work, open_requests).total)
    return found


def draw_roles(data: st.DataObject, nodes: list[str]) -> dict[str, Role]:
    prefills = data.draw(st.integers(1, len(nodes) - 1))
    order = data.draw(st.permutations(nodes))
    return {node: P if node in order[:prefills] else D for node in nodes}


@given(models=st.lists(MODELS, min_size=2, max_size=7), work=WORKS, open_requests=st.floats(0.1, 300), data=st.data())
def test_there_is_every_shape_once_with_the_fewest_moves(
    models: list[NodeModel], work: MeanWork, open_requests: float, data: st.DataObject
) -> None:
    by_id = {f"n{i}": model for i, model in enumerate(models)}
    roles = draw_roles(data, list(by_id))
    kinds = Kinds(by_id.values())
    found = fewest_moves(kinds, roles, by_id, work, open_requests)
    assert [placement.shape.prefill for placement in found] == list(range(1, len(roles)))
    for placement in found:
        reached = after(roles, placement)
        prefills = [node for node in reached if reached[node] is P]
        assert (placement.shape.prefill, placement.shape.decode) == (len(prefills), len(roles) - len(prefills))
        assert len(placement.moves) == abs(placement.shape.prefill - list(roles.values()).count(P))
        assert all(roles[node] is not role for node, role in placement.moves.items())
        assert placement.prefill.tolist() == kinds.count(by_id[node] for node in prefills).tolist()
        assert placement.decode.tolist() == kinds.count(by_id[n] for n in reached if n not in prefills).tolist()


@given(
    speeds=st.tuples(SPEEDS, SPEEDS, SPEEDS, SPEEDS),
    second=st.lists(st.booleans(), min_size=2, max_size=6),
    open_requests=st.floats(1, 300),
    data=st.data(),
)
def test_two_kinds_of_nodes_are_placed_as_well_as_by_trying_all(
    speeds: tuple[float, float, float, float], second: list[bool], open_requests: float, data: st.DataObject
) -> None:
    kinds = (node_model(*speeds[:2]), node_model(*speeds[2:]))
    models = {f"n{i}": kinds[which] for i, which in enumerate(second)}
    roles = draw_roles(data, list(models))
    work = mean_work(iterations=data.draw(st.floats(30, 1000)))
    for placement in placements(roles, models, work, open_requests):
        placed = throughput(models, after(roles, placement), work, open_requests).total
        best = best_by_trying_all(roles, models, placement.shape.prefill, work, open_requests)
        assert placed == pytest.approx(best, rel=1e-6)


def test_many_kinds_of_nodes_are_nearly_always_placed_as_well_as_by_trying_all() -> None:
    draw = random.Random(9)
    ratios = []
    for _ in range(60):
        models = {f"n{i}": node_model(draw.uniform(0.5, 2), draw.uniform(0.5, 2), 64) for i in range(6)}
        chosen = draw.sample(sorted(models), draw.randint(1, 5))
        roles = {node: P if node in chosen else D for node in models}
        work, open_requests = mean_work(iterations=draw.uniform(30, 1000)), draw.uniform(1, 300)
        for placement in placements(roles, models, work, open_requests):
            placed = throughput(models, after(roles, placement), work, open_requests).total
            ratios.append(placed / best_by_trying_all(roles, models, placement.shape.prefill, work, open_requests))
    assert sum(ratio > 1 - 1e-6 for ratio in ratios) > 0.95 * len(ratios)
    assert min(ratios) > 0.8


def test_the_one_that_is_slow_at_prefill_leaves_it() -> None:
    models = {"a": node_model(prefill=0.5), "b": node_model(), "c": node_model(), "d": node_model()}
    roles = {"a": P, "b": P, "c": P, "d": D}
    moves = {str(p.shape): dict(p.moves) for p in placements(roles, models, mean_work(iterations=900), 60)}
    assert moves["2P2D"] == {"a": D}


def test_the_one_that_is_fast_at_decode_joins_it() -> None:
    models = {"a": node_model(), "b": node_model(decode=2.0), "c": node_model(), "d": node_model()}
    roles = {"a": P, "b": P, "c": P, "d": D}
    moves = {str(p.shape): dict(p.moves) for p in placements(roles, models, mean_work(iterations=900), 60)}
    assert moves["2P2D"] == {"b": D}


def decoder(fixed_s: float, request_s: float) -> NodeModel:
    """A node that prefills like the others."""
    return replace(node_model(slots=256), decode=DecodeCoefficients(fixed_s, 0.0, request_s))


@pytest.mark.parametrize(("open_requests", "joins"), [(16, "few"), (60, "many")])
def test_who_is_fast_at_decode_depends_on_how_many_requests_each_node_gets(open_requests: float, joins: str) -> None:
    """Eight or thirty for each of two; `few` and `many` take equally long for thirteen."""
    few, many, poor = decoder(0.005, 0.002), decoder(0.03, 1e-4), decoder(0.5, 0.01)
    models = {"few": few, "many": many, "x": few, "y": poor}
    roles = {"few": P, "many": P, "y": P, "x": D}
    work = mean_work(iterations=2000)
    placed = {str(p.shape): p for p in placements(roles, models, work, open_requests)}["2P2D"]
    assert dict(placed.moves) == {joins: D}
    best = best_by_trying_all(roles, models, 2, work, open_requests)
    assert throughput(models, after(roles, placed), work, open_requests).total == pytest.approx(best)


@given(prefills=st.integers(1, 5), data=st.data())
def test_alike_nodes_move_by_id_the_last_first(prefills: int, data: st.DataObject) -> None:
    ids = data.draw(st.permutations([f"n{i}" for i in range(6)]))
    roles = {node: P if int(node[1]) < prefills else D for node in ids}
    for placement in placements(roles, dict.fromkeys(ids, node_model()), mean_work(), 60):
        moved = placement.shape.prefill - prefills
        gone, stay = (P, D) if moved < 0 else (D, P)
        of_phase = sorted(node for node, role in roles.items() if role is gone)
        assert dict(placement.moves) == dict.fromkeys(of_phase[len(of_phase) - abs(moved) :], stay)
