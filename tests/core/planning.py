"""What tests of planning share: splits, models of nodes, work, and strategies of these."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import strategies as st

from evolving.core.config import Gate, PlannerConfig
from evolving.core.planner import Split
from evolving.core.slices import Slice
from evolving.core.terms import Role
from evolving.core.throughput import MEMORY_WITHOUT_LIMIT, MeanWork, NodeModel
from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients
from evolving.core.work import query_key_pairs

NINE = [f"n{i}" for i in range(9)]


def split_of(epoch: int = 5, **roles: Role) -> Split:
    """A split of these roles."""
    return Split(epoch=epoch, roles=roles)


def shape_of(roles: Mapping[str, Role]) -> tuple[int, int]:
    """How many prefill, how many decode."""
    values = list(roles.values())
    return values.count(Role.PREFILL), values.count(Role.DECODE)


def node_model(prefill: float = 1.0, decode: float = 1.0, slots: int = 64) -> NodeModel:
    """A node with experts; `prefill` and `decode` are its speeds, 2.0 being twice as fast."""
    return NodeModel(
        PrefillCoefficients(0.020 / prefill, 1.0e-4 / prefill, 1.0e-9 / prefill, 1.0e-6 / prefill),
        DecodeCoefficients(0.010 / decode, 0.030 / decode, 1e-4 / decode, experts_per_token=8, experts=256),
        new_tokens_per_iteration=4096,
        decode_slots=slots,
    )


def mean_work(uncached: float = 3000, cached: float = 60_000, iterations: float = 300) -> MeanWork:
    """Work of a coding agent, unless told otherwise."""
    pairs = query_key_pairs(int(uncached), int(cached))
    return MeanWork(uncached, pairs, cached, cached / 2, iterations, context_tokens=uncached + cached + iterations / 2)


def a_slice(
    work: MeanWork | None, open_requests: float = 90.0, completions: int = 100, started_s: float = 0.0
) -> Slice:
    """One slice of a minute."""
    return Slice(started_s, started_s + 60, completions, 0, open_requests, work)


def _decode(d0: float, d1: float, d2: float, d3: float, experts: tuple[int, int]) -> DecodeCoefficients:
    return DecodeCoefficients(d0, d1, d2, d3, *experts)


MODELS = st.builds(
    NodeModel,
    st.builds(PrefillCoefficients, st.floats(0, 0.1), st.floats(1e-6, 1e-3), st.floats(0, 1e-8), st.floats(0, 1e-5)),
    st.builds(
        _decode,
        st.floats(1e-3, 0.1),
        st.floats(0, 0.1),
        st.floats(0, 1e-2),
        st.floats(0, 1e-7),
        st.sampled_from([(0, 0), (8, 256), (2, 8), (4, 4)]),
    ),
    new_tokens_per_iteration=st.floats(1, 8192),
    decode_slots=st.integers(1, 64),
    tokens_per_request=st.sampled_from([1.0, 3.0]),
    decode_tokens=st.sampled_from([MEMORY_WITHOUT_LIMIT, 200_000, 1_000_000, 4_000_000]),
)
WORKS = st.builds(mean_work, st.integers(1, 20_000), st.integers(0, 100_000), st.floats(0.5, 2000))


@st.composite
def planner_inputs(draw: st.DrawFn) -> tuple[Split, dict[str, NodeModel], list[Slice], PlannerConfig]:
    """A split, its nodes' models, ten slices and a configuration. Some slices say nothing; in most cases work changes
    little from slice to slice, so that gains pass the gate."""
    nodes = [f"n{i}" for i in range(draw(st.integers(2, 6)))]
    kinds = draw(st.lists(MODELS, min_size=1, max_size=3))
    models = {node: draw(st.sampled_from(kinds)) for node in nodes}
    roles = {node: draw(st.sampled_from([Role.PREFILL, Role.DECODE] * 2 + [Role.MIXED])) for node in nodes}
    works = draw(st.lists(WORKS, min_size=1, max_size=2))
    one = st.builds(a_slice, st.sampled_from(works), st.just(0.0) | st.floats(0.01, 300), st.integers(0, 30))
    steady = st.builds(a_slice, st.sampled_from(works), st.floats(50, 60))
    slices = draw(st.lists(draw(st.sampled_from([one, steady, steady])), min_size=10, max_size=10))
    return Split(2, roles), models, slices, PlannerConfig(gate=draw(st.sampled_from(Gate)))
