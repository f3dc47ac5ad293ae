"""Whose measurements tell how long a phase takes on a node that was never seen in it.

A node that only decodes says nothing of what it would take to prefill. Of nodes that are alike, one that was seen in a
phase speaks for those that were not: fitted coefficients beside configured ones would make a difference between nodes
that are none, and every split of them look better or worse than the present one. Everything here is pure.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping


def lenders(kinds: Mapping[str, Hashable], rows: Mapping[str, int]) -> dict[str, str | None]:
    """Of each node in `kinds`, the node whose fit of a phase is in force for it: its own, else the one with the most
    rows among nodes of its kind, the first by id of several; None: no node of its kind is fitted.

    `rows`: of the nodes fitted in the phase, how many rows their fits have. Those that are not in `kinds` count not.
    """
    best: dict[Hashable, str] = {}
    for node in sorted(set(rows) & set(kinds), key=lambda node: (-rows[node], node)):
        best.setdefault(kinds[node], node)
    return {node: node if node in rows else best.get(kind) for node, kind in kinds.items()}
