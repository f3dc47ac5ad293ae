"""The state machine's rules about nodes: their lives, their batches, snapshots and changes of role."""

from __future__ import annotations

from core.machine_world import NODES, World, cuts, nodes, picks, tails, tiers
from core.model import split_names
from core.pair import assert_raises_unchanged, chain, run_ref
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from evolving.core.config import DecodeToPrefill
from evolving.core.directory_types import Cleared, NodeEvent, Removed, Stored
from evolving.core.errors import StaleIncarnation, UnknownNode
from evolving.core.terms import Role, Tier

node_changes = st.lists(
    st.tuples(st.sampled_from(["store", "store", "store", "remove", "clear"]), tiers, picks, cuts, cuts),
    min_size=1,
    max_size=3,
)


class NodeRules(World):
    """Each node's batches come in sequence, with replays and gaps; nodes restart, go and come back at any time."""

    @rule(node_id=nodes, restart=st.booleans(), ahead=st.sampled_from([-1, 0, 0, 1]))
    def node_up(self, node_id: str, restart: bool, ahead: int) -> None:
        """A node comes up, restarts, or only says hello again."""
        node = self.pair.model.nodes.get(node_id)
        if node is None or restart:
            self.saw("node up" if node is None else "node restarted")
            self._start(node_id, max(0, 1 + ahead))
            return
        self.saw("node known")
        self.pair.node_up(node_id, node.incarnation, max(0, self.sequences[node_id] + 1 + ahead))
        self.snapshots.pop(node_id, None)

    @precondition(lambda self: bool(self.pair.model.nodes))
    @rule(pick=picks)
    def node_gone(self, pick: int) -> None:
        """A node is given up, perhaps one that never was."""
        node_id = [*sorted(self.pair.model.nodes), NODES[-1]][pick % (len(self.pair.model.nodes) + 1)]
        self.saw("node gone" if node_id in self.pair.model.nodes else "unknown node gone")
        self.pair.node_gone(node_id)
        self.snapshots.pop(node_id, None)

    @rule(node_id=nodes, changes=node_changes, lose_one=st.sampled_from([False] * 7 + [True]))
    def node_batch(self, node_id: str, changes: list[tuple[str, Tier, int, int, int]], lose_one: bool) -> None:
        """The node tells what changed; a run of any context, with or without what comes before it."""
        if node_id not in self.pair.model.nodes:
            assert_raises_unchanged(
                self.pair, UnknownNode, lambda: self.pair.core.node_events(self.pair.now_s, node_id, "i1", 1, [])
            )
            self.saw("batch of an unknown node")
            return
        self.sequences[node_id] += lose_one
        events: list[NodeEvent] = []
        for kind, tier, pick, first, blocks in changes:
            if kind == "clear":
                events.append(Cleared(tier))
                continue
            path = self._pick_text(pick)
            begin = first % len(path)
            run = run_ref(path, begin, min(len(path), begin + 1 + blocks))
            events.append(Stored(tier, run) if kind == "store" else Removed(tier, run))
            if not self.pair.parent_is_known(events[-1]):
                break  # whether the directory still knows the parent is its own business; nothing may hang on it
        self._send(node_id, events)

    @rule(node_id=nodes, tail=tails, tier=tiers)
    def batch_below_the_unknown(self, node_id: str, tail: str, tier: Tier) -> None:
        """Blocks deep in a context nobody heard of."""
        path = chain([], "d" * self.requests + tail + "e" * 40)
        self.pair.remember(path)
        if node_id in self.pair.model.nodes:
            self._send(node_id, [Stored(tier, run_ref(path, len(path) - 3, len(path)))])

    @rule(node_id=nodes, back=st.integers(0, 3))
    def batch_again(self, node_id: str, back: int) -> None:
        """A batch the directory took arrives once more, or one of an earlier life."""
        node = self.pair.model.nodes.get(node_id)
        if node is None:
            return
        self.saw(f"again {self.pair.node_events(node_id, max(0, node.sequence - back), [Cleared(Tier.L1)])}")
        assert_raises_unchanged(
            self.pair,
            StaleIncarnation,
            lambda: self.pair.core.node_events(self.pair.now_s, node_id, "i0", 1, [Cleared(Tier.L2)]),
        )

    @rule(node_id=nodes, at_once=st.booleans())
    def resync_begin(self, node_id: str, at_once: bool) -> None:
        """The node sends all it holds, asked or not."""
        if node_id not in self.pair.model.nodes:
            return
        parts: list[tuple[int, NodeEvent]] = []
        for tier, held in self.really[node_id].items():
            for name in sorted(held):
                path = self.pair.paths[name]
                if any(self.pair.paths[other][: len(path)] == path for other in held if other != name):
                    continue  # told with a longer run
                first = len(path)
                while first > 0 and path[first - 1] in held:
                    first -= 1
                parts.append((first, Stored(tier, run_ref(path, first, len(path)))))
        parts.sort(key=lambda part: part[0])
        self.pair.resync_begin(node_id)
        self.snapshots[node_id] = (self.sequences[node_id], [event for _, event in parts])
        self.saw("resync")
        while at_once and node_id in self.snapshots:
            self._resync_go_on(node_id, 9)

    @precondition(lambda self: bool(self.snapshots))
    @rule(pick=picks, most=st.integers(1, 9))
    def resync_go_on(self, pick: int, most: int) -> None:
        """A part of a snapshot, or its end; other events come in between."""
        self._resync_go_on(sorted(self.snapshots)[pick % len(self.snapshots)], most)

    def _resync_go_on(self, node_id: str, most: int) -> None:
        sequence, parts = self.snapshots[node_id]
        if not parts:
            self.pair.resync_end(node_id, sequence)
            del self.snapshots[node_id]
            self.saw("resync ended")
            return
        while parts and most:
            event = parts.pop(0)
            most -= 1
            if self.pair.parent_is_known(event):
                self.pair.resync_events(node_id, [event])
            else:  # blocks without what comes before them: such a node lets them go
                assert isinstance(event, Stored)
                self.really[node_id][event.tier] -= set(split_names(event.run.names)[event.run.skip :])

    @rule(node_id=nodes, old=st.sampled_from(Role), new=st.sampled_from(Role))
    def role_switch(self, node_id: str, old: Role, new: Role) -> None:
        """Any change of role."""
        self._switch(node_id, old, new)

    @rule(node_id=nodes)
    def switch_to_prefill(self, node_id: str) -> None:
        """The one that matters."""
        self._switch(node_id, Role.DECODE, Role.PREFILL)

    def _switch(self, node_id: str, old: Role, new: Role) -> None:
        if node_id not in self.pair.model.nodes:
            return
        mattered = self.pair.role_switch(node_id, old, new)
        rule_ = self.pair.model.config.decode_to_prefill
        if mattered and rule_ is DecodeToPrefill.RESET:  # the node empties itself, and says so
            self._send(node_id, [Cleared(tier) for tier in Tier])
        self.saw(f"switch to prefill, {rule_}" if mattered else "switch without effect")
