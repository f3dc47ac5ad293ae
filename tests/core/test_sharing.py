"""Whose fits of the time model are in force: among nodes that are alike all are fitted, or none (section 4.2)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evolving.core.sharing import lenders

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
