"""The directory and the naive model side by side: every event goes to both, and what they say is compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from hashlib import sha256
from typing import NamedTuple, TypeVar, cast

import pytest
from core.model import Key, Model, ModelNode, Name, split_names
from core.sides import Sides

from evolving.core import directory_types as types
from evolving.core.config import DirectoryConfig
from evolving.core.directory import Directory
from evolving.core.directory_log import LogEntry
from evolving.core.directory_snapshot import SnapshotPart
from evolving.core.directory_types import Begin, BeginKind, Effect, Landed, NodeEvent, Output
from evolving.core.errors import CoreError, NeedFull, StaleVersion
from evolving.core.terms import ANCHOR_BLOCKS, Role, Tier
from evolving_directory.records import decode, encode

Kind = TypeVar("Kind")


def chain(before: Sequence[Name], letters: str) -> list[Name]:
    """A context that goes on with one block a letter: equal letters after equal contexts make equal names."""
    names = list(before)
    for letter in letters:
        names.append(sha256((names[-1] if names else b"") + letter.encode()).digest()[:16])
    return names


def run_ref(path: Sequence[Name], first: int, end: int) -> types.RunRef:
    """Blocks [first, end) of a context as a node names them."""
    anchor = 0 if first == 0 else (first - 1) // ANCHOR_BLOCKS * ANCHOR_BLOCKS
    return types.RunRef(anchor, b"".join(path[anchor:end]), first - anchor)


class Checkpoint(NamedTuple):
    """What is on the disk at some moment, and what the directory is then."""

    entries: int
    model: Model


class Pair(Sides):
    """What happens, to both."""

    def __init__(self, config: DirectoryConfig) -> None:
        super().__init__(config)
        self.effects: list[Effect] = []  # of the last event
        self.listeners: list[Callable[[list[Effect]], object]] = []  # who else hears of effects
        self.snapshot: list[bytes] = []  # of the directory's log
        self.log: list[bytes] = []  # since that snapshot
        self.core.keep_log(self._append)

    # -------------------------------------------------------------------------------------------------------- effects

    def _took(self, effects: list[Effect]) -> list[Effect]:
        """Carry out what concerns nodes, as a node would."""
        self.effects = effects
        for listener in self.listeners:
            listener(effects)
        for effect in effects:
            assert effect.reason
            if isinstance(effect, types.CountUpdate):
                assert effect.names
                assert effect.node_id in self.model.nodes, effect
                for name in split_names(effect.names):
                    self.pushed[effect.node_id][name] = effect.count
                    self.elsewhere[effect.node_id, name] = effect.elsewhere
                    self.heard.get(effect.node_id, set()).add(name)
            elif isinstance(effect, types.CountsComplete):
                counts, heard = self.pushed[effect.node_id], self.heard.pop(effect.node_id)
                self.pushed[effect.node_id] = {name: count for name, count in counts.items() if name in heard}
        return effects

    def told(self, kind: type[Kind]) -> list[Kind]:
        """Effects of a kind that the last event had."""
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def _ends_are(self, expected: set[Key], expired: Callable[[Key], bool] = lambda key: False) -> None:
        ends = self.told(types.EndedBranch)
        assert len(ends) == len(expected)
        assert {(end.tenant, end.branch_id) for end in ends} == expected
        assert all(end.expired == expired((end.tenant, end.branch_id)) for end in ends)

    def _was_ignored(self, taken: bool) -> None:
        """What the model ignores the directory ignores, with a word for the metric; what turns did may be told then."""
        ignored = self.told(types.Ignored)
        assert bool(ignored) == (not taken), (taken, self.effects)
        assert taken or all(isinstance(each, types.Ignored | types.CountUpdate) for each in self.effects)
        assert all(each.kind for each in ignored)

    def remember(self, context: list[Name]) -> None:
        """The blocks of a context may be met from now on."""
        for depth, name in enumerate(context, 1):
            self.paths.setdefault(name, context[:depth])

    # ------------------------------------------------------------------------------------------------------- branches

    def begin(self, event: Begin, prompt: list[Name]) -> BeginKind | str:
        """A Begin whose whole context is `prompt`; returns its kind, or the code it was refused with. When its base is
        not known it is sent again in full, as a gateway does."""
        self.remember(prompt)
        refusal = self.model.refusal(event, prompt)
        refused: CoreError | None = None
        try:
            answer, effects = self.core.begin(self.now_s, event)
        except CoreError as error:
            refused = error
        if isinstance(refused, NeedFull):
            assert not self._surely_known(event), event
            self.compare()
            return self.begin(replace(event, base_blocks=0, base_name=b"", new_names=b"".join(prompt)), prompt)
        assert (refused.code if refused is not None else None) == refusal
        if refused is not None:
            branch = self.model.live(event.tenant, event.branch_id)
            assert not isinstance(refused, StaleVersion) or (branch and refused.current == branch.version)
            return refused.code
        version, kind = self.model.begin(self.now_s, event, prompt)
        self._took(effects)
        assert (answer.version, answer.kind, answer.prompt_blocks) == (version, kind, len(prompt))
        losses = self.model.branches[event.tenant, event.branch_id].requests[event.request_id].losses
        assert answer.loss in (losses or {types.Loss.NONE})
        assert not self.told(types.EndedBranch)
        self.compare_match(answer.match, prompt)
        return kind

    def rematch(self, event: Begin, context: list[Name]) -> None:
        """A request that lost its node asks where its blocks are; `context` is its prompt and its output so far."""
        try:
            match = self.core.rematch(self.now_s, event)
        except NeedFull:
            assert not self._surely_known(event), event
            self.rematch(replace(event, base_blocks=0, base_name=b"", new_names=b"".join(context)), context)
            return
        self.model.rematch(self.now_s, event)
        self.compare_match(match, context)

    def _surely_known(self, event: Begin) -> bool:
        """Whether the base is in a context where the directory must find it: the branch's own, or its parent's."""
        if event.base_blocks == 0:
            return True
        contexts = [
            branch.context
            for branch in (
                self.model.live(event.tenant, event.branch_id),
                self.model.live(event.tenant, event.parent_branch_id),
            )
            if branch is not None
        ]
        return any(context[event.base_blocks - 1 : event.base_blocks] == [event.base_name] for context in contexts)

    def landed(self, event: Landed) -> bool:
        """KV landed; returns whether that was taken."""
        self._took(self.core.landed(self.now_s, event))
        taken = self.model.landed(self.now_s, event)
        self._was_ignored(taken)
        return taken

    def output(self, event: Output) -> bool:
        """Output blocks were completed; returns whether that was taken."""
        branch = self.model.live(event.tenant, event.branch_id)
        before = branch.context[: event.first_block] if branch is not None else []
        self._took(self.core.output(self.now_s, event))
        taken = self.model.output(self.now_s, event)
        self._was_ignored(taken)
        if taken:
            self.remember([*before, *split_names(event.names)])
        return taken

    def done(self, tenant: str, branch_id: str, request_id: str) -> bool:
        """A request is over; returns whether that was news."""
        live_before = self.model.live(tenant, branch_id) is not None
        self._took(self.core.request_done(self.now_s, tenant, branch_id, request_id))
        taken = self.model.request_done(self.now_s, tenant, branch_id, request_id)
        self._was_ignored(taken)
        ended = live_before and self.model.live(tenant, branch_id) is None
        self._ends_are({(tenant, branch_id)} if ended else set())
        return taken

    def end(self, tenant: str, branch_ids: Sequence[str], subtree: bool) -> set[Key]:
        """Branches are ended; returns those that were live."""
        self._took(self.core.end(self.now_s, tenant, branch_ids, subtree))
        ended = self.model.end(self.now_s, tenant, branch_ids, subtree)
        self._ends_are(ended)
        return ended

    def advance(self, seconds: float, settle: bool) -> set[Key]:
        """Time passes; with `settle` the directory is woken until it has nothing left to do now."""
        self.now_s += seconds
        self._took(self.core.tick(self.now_s))
        ended = self.model.tick(self.now_s)
        self._ends_are(ended, lambda key: self.model.branches.get(key) is None or self._expired(key))
        wakeup_s = self.core.next_wakeup_s()
        due_s = min(self.model.due_s(), default=None)
        assert due_s is None or (wakeup_s is not None and wakeup_s <= due_s)
        if settle:
            for _ in range(10_000):
                wakeup_s = self.core.next_wakeup_s()
                if wakeup_s is None or wakeup_s > self.now_s:
                    break
                assert all(isinstance(each, types.CountUpdate) for each in self._took(self.core.tick(self.now_s)))
            assert wakeup_s == due_s
        return ended

    def _expired(self, key: Key) -> bool:
        return self.model.branches[key].state is types.BranchState.EXPIRED

    # ---------------------------------------------------------------------------------------------------------- nodes

    def node_up(self, node_id: str, incarnation: str, next_sequence: int = 0) -> None:
        """A node says hello; under a new incarnation it knows no counts."""
        node = self.model.nodes.get(node_id)
        if node is None or node.incarnation != incarnation:
            self.pushed[node_id] = {}
            self.heard.pop(node_id, None)
        self._took(self.core.node_up(self.now_s, node_id, incarnation, next_sequence))
        self.model.node_up(node_id, incarnation, next_sequence)
        assert len(self.told(types.NeedResync)) == self.model.nodes[node_id].lost

    def node_gone(self, node_id: str) -> None:
        """A node is given up."""
        effects = self.core.node_gone(self.now_s, node_id)
        self.model.node_gone(node_id)
        self.pushed.pop(node_id, None)
        self.heard.pop(node_id, None)
        self._took(effects)

    def role_switch(self, node_id: str, old: Role, new: Role, settle: bool = True) -> bool:
        """A node's role changes, and with `settle` all branches have taken that; returns whether that concerned the
        directory."""
        self._took(self.core.role_switch(self.now_s, node_id, old, new))
        mattered = self.model.role_switch(node_id, old, new)
        if settle:
            self.advance(0.0, settle=True)
        return mattered

    def node_events(self, node_id: str, sequence: int, events: Sequence[NodeEvent]) -> str:
        """A batch of a node's events; returns what became of it."""
        node = self.model.nodes[node_id]
        self._took(self.core.node_events(self.now_s, node_id, node.incarnation, sequence, events))
        if node.lost or node.in_snapshot or sequence <= node.sequence:
            self._was_ignored(taken=False)
            return "ignored"
        if sequence > node.sequence + 1:
            assert len(self.told(types.NeedResync)) == 1
            node.lost = True
            return "gap"
        asked = self.told(types.NeedResync)
        node.sequence = sequence
        for event in events:
            if asked and not self.parent_is_known(event):
                node.lost = True
                return "unknown parent"
            self._apply(node, event)
        assert not asked
        return "taken"

    def parent_is_known(self, event: NodeEvent) -> bool:
        """Whether the directory must find the place of a run: it starts near a context's first block, or the block
        before it is in a context, or held by a node, or has a descendant that is."""
        if not isinstance(event, types.Stored) or event.run.first_block == 0:
            return True
        before = split_names(event.run.names)[max(event.run.skip - 1, 0)]
        return any(before in self.paths[name] for name in self.model.known_names())

    def _apply(self, node: ModelNode, event: NodeEvent) -> None:
        if isinstance(event, types.Cleared):
            node.held[event.tier].clear()
            return
        meant = split_names(event.run.names)[event.run.skip :]
        if isinstance(event, types.Stored):
            node.held[event.tier].update(meant)
        else:
            node.held[event.tier].difference_update(meant)

    def resync_begin(self, node_id: str) -> None:
        """A snapshot of a node follows."""
        node = self.model.nodes[node_id]
        self._took(self.core.resync_begin(self.now_s, node_id, node.incarnation))
        assert not self.told(types.CountUpdate), "unknown is not 0"
        node.in_snapshot = True
        node.held = {tier: set() for tier in Tier}
        self.heard[node_id] = set()

    def resync_events(self, node_id: str, events: Sequence[NodeEvent]) -> None:
        """Part of a snapshot; all parents known."""
        node = self.model.nodes[node_id]
        self._took(self.core.resync_events(self.now_s, node_id, node.incarnation, events))
        for event in events:
            self._apply(node, event)

    def resync_end(self, node_id: str, sequence: int) -> None:
        """The snapshot is complete."""
        node = self.model.nodes[node_id]
        self._took(self.core.resync_end(self.now_s, node_id, node.incarnation, sequence))
        assert [effect.node_id for effect in self.told(types.CountsComplete)] == [node_id]
        node.sequence, node.lost, node.in_snapshot = sequence, False, False

    # ------------------------------------------------------------------------------------------------------- restarts

    def _append(self, entry: LogEntry) -> None:
        self.log.append(encode(entry))

    def _rebuilt(self, log: Sequence[bytes]) -> Directory:
        parts = (cast("SnapshotPart", decode(part)) for part in self.snapshot)
        directory = Directory.restore(self.model.config, parts)
        for entry in log:
            directory.replay(cast("LogEntry", decode(entry)))
        return directory

    def compact(self, entries: int) -> None:
        """Turn the first entries of the log into a snapshot."""
        self.snapshot = [encode(part) for part in self._rebuilt(self.log[:entries]).snapshot()]
        del self.log[:entries]

    def checkpoint(self) -> Checkpoint:
        """What a restart would come back to if nothing more reached the disk."""
        return Checkpoint(len(self.log), deepcopy(self.model))

    def restart(self, lost_since: Checkpoint | None = None) -> None:
        """The directory dies and starts again from snapshot and log. lost_since: what came later never got that far."""
        if lost_since is not None:
            del self.log[lost_since.entries :]
            self.model = lost_since.model
        self.core = self._rebuilt(self.log)
        self.core.keep_log(self._append)
        self.model.restart()
        for node_id in self.model.nodes:
            self.pushed.setdefault(node_id, {})
            self.heard[node_id] = set()
        self.compare()


def assert_raises_unchanged(pair: Pair, error: type[CoreError], call: Callable[[], object]) -> None:
    """The call is refused and changes nothing."""
    with pytest.raises(error):
        call()
    pair.compare()
