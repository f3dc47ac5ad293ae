"""Whose fits of the time model are in force: among nodes that are alike all are fitted, or none (section 4.2)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evolving.core.iterations import IterationSums, IterationWindow, Mix, measure_mix
from evolving.core.sharing import MIX_ITERATIONS_LEAST, lenders, shared_mixes
from evolving.core.timemodel import PrefillSums

NODES = st.sampled_from("abcdefgh")
KINDS = st.dictionaries(NODES, st.integers(0, 2))
ROWS = st.dictionaries(NODES, st.integers(20, 23))


@given(kinds=KINDS, rows=ROWS)
def test_fitted_and_configured_coefficients_never_mix_among_alike_nodes(
    kinds: dict[str, int], rows: dict[str, int]
) -> None:
    found = lenders(kinds, rows)
    assert set(found) == set(kinds)
    for kind in set(kinds.values()):
        alike = [node for node in kinds if kinds[node] == kind]
        fitted = any(node in rows for node in alike)
        assert all((found[node] is not None) == fitted for node in alike)


@given(kinds=KINDS, rows=ROWS)
def test_a_node_uses_its_own_fit_or_the_best_known_one_of_a_node_alike(
    kinds: dict[str, int], rows: dict[str, int]
) -> None:
    for node, lender in lenders(kinds, rows).items():
        if node in rows:
            assert lender == node
        elif lender is not None:
            assert kinds[lender] == kinds[node]
            others = [other for other in rows if kinds.get(other) == kinds[node]]
            assert all((rows[lender], other) >= (rows[other], lender) for other in others), "most rows, then by id"


@given(kinds=KINDS, rows=ROWS, more=st.integers(24, 30))
def test_what_comes_of_one_kind_changes_nothing_for_another(
    kinds: dict[str, int], rows: dict[str, int], more: int
) -> None:
    before = lenders(kinds, rows)
    for newly, its_kind in kinds.items():
        after = lenders(kinds, {**rows, newly: more})
        assert all(after[node] == before[node] for node, kind in kinds.items() if kind != its_kind)


WINDOWS = st.builds(
    lambda alone, mixed, new, cached: IterationWindow(
        prefill=IterationSums(alone, prefill=PrefillSums(new, 0.0, cached // 2, cached)),
        mixed=IterationSums(mixed, prefill=PrefillSums(mixed)),
    ),
    st.integers(0, 30),
    st.integers(0, 30),
    st.integers(0, 9999),
    st.integers(0, 99),
)


@given(kinds=KINDS, lately=st.dictionaries(NODES, WINDOWS))
def test_the_mix_is_a_node_s_own_or_that_of_all_alike_or_nobody_s(
    kinds: dict[str, int], lately: dict[str, IterationWindow]
) -> None:
    def known(*nodes: str) -> Mix | None:
        windows = [lately[node] for node in nodes if node in lately]
        iterations = sum(window.prefill.iterations + window.mixed.iterations for window in windows)
        return measure_mix(windows) if iterations >= MIX_ITERATIONS_LEAST else None

    found = shared_mixes(kinds, lately)
    assert set(found) == set(kinds)
    for node, kind in kinds.items():
        alike = [other for other in kinds if kinds[other] == kind]
        assert found[node] == (known(node) or known(*alike) or Mix(None, None))
