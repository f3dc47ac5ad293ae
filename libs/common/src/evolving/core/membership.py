"""What becomes of the split as nodes come and go, the first split included.

Pure, like core/planner.py, and returns the same `Decision`, of kind MEMBERSHIP.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from evolving.core.modes import Hold, hold_in_force
from evolving.core.planner import Decision, DecisionKind, Split, SplitShape, assign, make_decision, role_counts
from evolving.core.terms import Role


def follow_membership(
    split: Split,
    live: Collection[str],
    *,
    initial: SplitShape | None,
    prefill_share: float,
    author: str,
    now_s: float,
    hold: Hold | None = None,
    warm: Collection[str] | None = None,
) -> Decision | None:
    """What becomes of the split now that exactly `live` nodes are there; None: it already fits them.

    At once, whatever the cooldown, the mode or an operator's `hold`, which stays in force.

    Nodes that stay keep their roles, unless a phase would be left without a node. Nodes that join are assigned
    towards `prefill_share`. The first split of all is `initial` once that many nodes are there; without `initial`,
    half of the nodes prefill, rounded up, once there are two. `warm`: the nodes that count for that, having served both
    phases for long enough; None: all do.
    """
    if split.epoch == 0:
        ready = len(live) if warm is None else len(set(live) & set(warm))
        return _first_split(split, live, ready, initial, author, now_s, hold)
    joined = sorted(set(live) - set(split.roles))
    lost = sorted(set(split.roles) - set(live))
    if not live or not (lost or (joined and len(live) > 1)):
        return None  # with no node left there is nothing to decide; a single unlisted one serves both phases anyway
    roles = {node: role for node, role in split.roles.items() if node in live}
    if len(live) > 1:
        for node in joined:
            roles[node] = _role_for_newcomer(roles, prefill_share)
        _fill_empty_phase(roles)
    changes = [f"lost {', '.join(lost)}"] if lost else []
    changes += [f"joined {', '.join(joined)}"] if joined else []
    return make_decision(
        split,
        roles,
        DecisionKind.MEMBERSHIP,
        "; ".join(changes),
        author,
        prefill_share,
        now_s,
        hold=hold_in_force(hold, now_s),
    )


def default_shape(nodes: int) -> SplitShape:
    """Half of the nodes prefill, rounded up."""
    assert nodes >= 2
    return SplitShape(prefill=(nodes + 1) // 2, decode=nodes // 2)


def _first_split(
    split: Split,
    live: Collection[str],
    ready: int,
    initial: SplitShape | None,
    author: str,
    now_s: float,
    hold: Hold | None,
) -> Decision | None:
    wanted_nodes = initial.total if initial else 2
    if ready < wanted_nodes:
        return None
    shape = initial or default_shape(len(live))
    first, later = sorted(live)[: shape.total], sorted(live)[shape.total :]
    roles = assign(shape, {}, first)
    for node in later:
        roles[node] = _role_for_newcomer(roles, shape.prefill_share)
    reason = f"first split, {shape} of {len(live)} nodes"
    return make_decision(
        split,
        roles,
        DecisionKind.MEMBERSHIP,
        reason,
        author,
        shape.prefill_share,
        now_s,
        hold=hold_in_force(hold, now_s),
    )


def _role_for_newcomer(roles: Mapping[str, Role], prefill_share: float) -> Role:
    """The role that leaves the share of prefilling nodes nearest to the one aimed at; a tie prefills."""
    prefills, decodes = role_counts(roles)
    after = prefills + decodes + 1
    if_prefill = abs((prefills + 1) / after - prefill_share)
    if_decode = abs(prefills / after - prefill_share)
    return Role.PREFILL if if_prefill <= if_decode else Role.DECODE


def _fill_empty_phase(roles: dict[str, Role]) -> None:
    """With two serving nodes or more, move one (the last by id) into a phase that has none."""
    for wanted, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        serving = [node for node, role in roles.items() if role is not Role.DRAINING]
        if len(serving) >= 2 and all(roles[node] is other for node in serving):
            roles[max(serving)] = wanted
