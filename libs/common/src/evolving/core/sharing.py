"""Whose measurements tell how long a phase takes on a node that was never seen in it.

A node that only decodes says nothing of what it would take to prefill. Of nodes that are alike, one that was seen in a
phase speaks for those that were not: fitted coefficients beside configured ones would make a difference between nodes
that are none, and every split of them look better or worse than the present one. Everything here is pure.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from evolving.core.iterations import IterationWindow, Mix, measure_mix

# Prefill iterations of a node, below which their mean size is not known.
MIX_ITERATIONS_LEAST = 20


def lenders(kinds: Mapping[str, Hashable], rows: Mapping[str, int]) -> dict[str, str | None]:
    """Of each node in `kinds`, the node whose fit of a phase is in force for it: its own, else the one with the most
    rows among nodes of its kind, the first by id of several; None: no node of its kind is fitted.

    `rows`: of the nodes fitted in the phase, how many rows their fits have. Those that are not in `kinds` count not.
    """
    best: dict[Hashable, str] = {}
    for node in sorted(set(rows) & set(kinds), key=lambda node: (-rows[node], node)):
        best.setdefault(kinds[node], node)
    return {node: node if node in rows else best.get(kind) for node, kind in kinds.items()}


def shared_mixes(kinds: Mapping[str, Hashable], lately: Mapping[str, IterationWindow]) -> dict[str, Mix]:
    """ū and ρ of each node in `kinds`: its own, or, where it hardly prefilled, that of all nodes of its kind together.

    `lately`: sums over the iterations of nodes in the time that counts. A node that decodes is compared as one that
    prefills: it would then do as those do, not as it did when it prefilled last, or as its chunk size allows.
    """
    alike: dict[Hashable, list[IterationWindow]] = {}
    for node, kind in kinds.items():
        alike.setdefault(kind, []).extend([lately[node]] if node in lately else ())
    shared = {kind: _mix(*windows) for kind, windows in alike.items()}
    own = {node: _mix(lately[node]) for node in kinds if node in lately}
    return {
        node: own[node] if node in own and own[node].new_tokens_per_iteration is not None else shared[kind]
        for node, kind in kinds.items()
    }


def _mix(*windows: IterationWindow) -> Mix:
    iterations = sum(window.prefill.iterations + window.mixed.iterations for window in windows)
    return measure_mix(windows) if iterations >= MIX_ITERATIONS_LEAST else Mix(None, None)
