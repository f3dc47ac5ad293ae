"""The state machine's rules about the directory's own restarts: from its log, from a snapshot and the log after it, and
with events that it took but never wrote down."""

from __future__ import annotations

from core.machine_nodes import NodeRules
from core.machine_world import branches, nodes, picks, tails, turn_ends
from core.model import Key
from core.pair import Checkpoint, chain
from hypothesis import strategies as st
from hypothesis.stateful import rule

from evolving.core.directory_types import Begin
from evolving.core.terms import Role

resyncs = st.sampled_from([True, True, True, False])  # whether nodes send their snapshots before anything else happens
keeps = st.sampled_from([None, None, 0, 0, 3])  # entries that a snapshot leaves in the log; None: no snapshot is made


class RestartRules(NodeRules):
    """After a restart nodes send snapshots at once, or late, or start anew themselves before they do."""

    def _restart(self, keep: int | None, resync: bool, lost_since: Checkpoint | None = None) -> None:
        if keep is not None and lost_since is None:
            self.pair.compact(max(0, len(self.pair.log) - keep))
            self.saw("compacted")
        self.saw("restart from a snapshot" if self.pair.snapshot else "restart from the log alone")
        self.pair.restart(lost_since)
        self.snapshots.clear()  # their streams broke
        if resync:
            for node_id in sorted(self.pair.model.nodes):
                self.resync_begin(node_id, at_once=True)
            self.saw("restart, then all resynced")

    @rule(keep=keeps, resync=resyncs)
    def restart_directory(self, keep: int | None, resync: bool) -> None:
        """At any moment."""
        self._restart(keep, resync)

    @rule(
        key=branches,
        tail=tails,
        output=st.sampled_from(["b", "c" * 18]),
        prefill=nodes,
        decode=nodes,
        then=st.sampled_from(["switch", "fork", "family", "base of copies"]),
        keep=keeps,
    )
    def restart_after(
        self, key: Key, tail: str, output: str, prefill: str, decode: str, then: str, keep: int | None
    ) -> None:
        """After what a log that leaned on copies, or a snapshot that left something out, would not bring back."""
        if not {prefill, decode} <= self.pair.model.nodes.keys():
            return
        self._serve(key, tail or "a", output, prefill, decode, end="done")
        branch = self.pair.model.live(*key)
        if branch is None:
            return
        context, other = branch.context, (key[0], "d" if key[1] != "d" else "c")
        if then == "switch":
            self._switch(decode, Role.DECODE, Role.PREFILL)
        elif then == "base of copies":
            self.pair.end(key[0], [key[1]], subtree=False)
            self.requests += 1
            self._begin(Begin(*other, f"q{self.requests}", base_blocks=len(context), base_name=context[-1]), context)
        else:
            prompt = chain(context, tail)
            self.requests += 1
            self._begin(Begin(*other, f"q{self.requests}", 0, key[1], new_names=b"".join(prompt)), prompt)
            if then == "family":
                self.pair.end(key[0], [key[1]], subtree=False)
        self.saw(f"restart after {then}")
        self._restart(keep, resync=True)

    @rule(key=branches, tail=tails, output=tails, prefill=nodes, decode=nodes, end=turn_ends, resync=resyncs)
    def crash_before_the_append(
        self, key: Key, tail: str, output: str, prefill: str, decode: str, end: str, resync: bool
    ) -> None:
        """A turn is taken whose entries never reach the disk; nodes have its blocks all the same."""
        if not {prefill, decode} <= self.pair.model.nodes.keys():
            return
        before = self.pair.checkpoint()
        self._serve(key, tail or "a", output, prefill, decode, end)
        self.saw("crash before the append")
        self._restart(None, resync, lost_since=before)

    @rule(key=branches, subtree=st.booleans(), pick=picks, seconds=st.sampled_from([0.0, 61.0, 151.0]))
    def crash_after_ends(self, key: Key, subtree: bool, pick: int, seconds: float) -> None:
        """Branches end, time ends others, a node goes: none of it reaches the disk, and time alone ends them again."""
        before = self.pair.checkpoint()
        self.pair.end(key[0], [key[1]], subtree)
        self.pair.advance(seconds, settle=False)
        self.pair.node_gone(sorted(self.really)[pick % len(self.really)])
        self.saw("crash after ends")
        self._restart(None, resync=True, lost_since=before)
        self.pair.advance(0.0, settle=True)
