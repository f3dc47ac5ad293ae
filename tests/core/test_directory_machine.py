"""The directory beside a naive model, under any order of any events (§4.1 of arXiv 2611.12304).

Contexts are spelt with a handful of letters, so that forks, shared prefixes and rewrites meet all the time; pieces
around 16 blocks long, so that they meet at, before and after the depths the index knows by name. Events of different
branches and nodes come in any order, early, late, twice and never; each node's own batches come in sequence, with
replays and gaps.
"""

from __future__ import annotations

from collections import Counter

import pytest
from core.model import Key, ModelRequest, Name, common_prefix, split_names
from core.pair import Pair, assert_raises_unchanged, chain, run_ref
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Stage
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from evolving.core.config import DecodeToPrefill, DirectoryConfig
from evolving.core.directory_types import Begin, Cleared, Landed, NodeEvent, Output, Removed, Stored
from evolving.core.errors import InvalidArgument, StaleIncarnation, UnknownNode
from evolving.core.terms import ANCHOR_BLOCKS, Phase, Role, Tier

SEEN: Counter[str] = Counter()
"""What happened in all runs of this process: the machine is worth something only when everything did."""

BRANCHES = [("t", "a"), ("t", "b"), ("t", "c"), ("t", "d"), ("u", "a")]
NODES = ["n0", "n1", "n2"]
PIECES = ["a", "b", "ab", "c" * 3, "a" * 7, "b" * 15, "a" * 16, "c" * 17, "b" * 40]

branches = st.sampled_from(BRANCHES)
nodes = st.sampled_from(NODES)
tiers = st.sampled_from(Tier)
phases = st.sampled_from(Phase)
tails = st.lists(st.sampled_from(PIECES), max_size=3).map("".join)
picks = st.integers(0, 11)  # which of the things there are, modulo their number
cuts = st.one_of(st.integers(0, 6), st.integers(0, 80))
shapes = st.sampled_from(["prompt", "context", "cut", "other", "fresh"])
bases = st.sampled_from(["full", "own", "parent", "index", "wrong"])
node_changes = st.lists(
    st.tuples(st.sampled_from(["store", "store", "store", "remove", "clear"]), tiers, picks, cuts, cuts),
    min_size=1,
    max_size=3,
)


class DirectoryMachine(RuleBasedStateMachine):
    """Rules are the events; every rule ends with everything compared."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair(DirectoryConfig())
        self.requests = 0
        self.incarnations = 0
        self.sent: list[Begin | Landed | Output | tuple[str, str, str]] = []  # what may arrive once more
        self.prompts: dict[tuple[Key, str], list[Name]] = {}
        self.sequences: dict[str, int] = {}  # node -> last batch it made
        self.really: dict[str, dict[Tier, set[Name]]] = {}  # node -> what it holds, whoever heard of it
        self.snapshots: dict[str, tuple[int, list[NodeEvent]]] = {}  # node -> its batch then, parts still to be sent
        self.texts: list[list[Name]] = [chain([], "a" * 20)]  # contexts of late

    @initialize(rule_=st.sampled_from(DecodeToPrefill), run_blocks=st.sampled_from([1, 3, 24, 256]))
    def configure(self, rule_: DecodeToPrefill, run_blocks: int) -> None:
        """Small limits, so that all of them are met."""
        config = DirectoryConfig(
            idle_ttl_s=100.0,
            tombstone_s=150.0,
            request_ttl_s=60.0,
            remembered_requests=2,
            run_blocks_max=run_blocks,
            sweep_runs_per_tick=2,
            decode_to_prefill=rule_,
        )
        self.pair = Pair(config)
        self.pair.remember(self.texts[0])
        for node_id in NODES[:2]:
            self._start(node_id)
        self._serve(("t", "a"), "aaab", "cc", "n0", "n1", ends=True)
        self._serve(("t", "b"), "aaa" + "b" * 30, "", "n0", "n1", ends=False, version=2)

    def saw(self, what: str) -> None:
        """Count what happened."""
        SEEN[what] += 1

    # ---------------------------------------------------------------------------------------------------- what there is

    def _pick_text(self, pick: int) -> list[Name]:
        contexts = [branch.context for branch in self.pair.model.live_branches() if branch.context]
        choice = contexts + self.texts[-4:]
        return choice[pick % len(choice)]

    def _pick_branch(self, who: int) -> Key:
        """Mostly a live one."""
        live = sorted(branch.key for branch in self.pair.model.live_branches())
        return live[who % len(live)] if live and who < 11 else BRANCHES[who % len(BRANCHES)]

    def _pick_request(self, key: Key, pick: int) -> tuple[str, ModelRequest | None]:
        branch = self.pair.model.live(*key)
        known = list(branch.requests.items()) if branch is not None else []
        if pick == 11 or not known:
            return f"q{pick % (self.requests + 1)}", None
        return known[-1 - pick % len(known)]

    def _prompt(self, key: Key, shape: str, pick: int, cut: int, tail: str) -> list[Name]:
        branch = self.pair.model.live(*key)
        if shape == "fresh" or branch is None:
            return chain(self._pick_text(pick)[:cut] if shape == "other" else [], tail)
        start = {
            "prompt": branch.prompt,
            "context": branch.context,
            "cut": branch.context[:cut],
            "other": self._pick_text(pick)[:cut],
        }[shape]
        return chain(start, tail)

    # -------------------------------------------------------------------------------------------------------- branches

    @rule(
        key=branches,
        shape=shapes,
        pick=picks,
        cut=cuts,
        tail=tails,
        base=bases,
        version=st.sampled_from(["none", "none", "same", "next", "later"]),
        parent=st.sampled_from(["", "a", "b", "c", "x"]),
        end_after=st.sampled_from([False, False, False, True]),
    )
    def begin(
        self,
        key: Key,
        shape: str,
        pick: int,
        cut: int,
        tail: str,
        base: str,
        version: str,
        parent: str,
        end_after: bool,
    ) -> None:
        """A new request."""
        self.requests += 1
        branch = self.pair.model.live(*key)
        current = branch.version if branch is not None else 1
        given = {"none": 0, "same": current, "next": current + 1, "later": current + 5}[version]
        prompt = self._prompt(key, shape, pick, cut, tail)
        event = Begin(*key, f"q{self.requests}", given, parent, end_after=end_after, body_digest=b"body")
        self._begin(self._with_base(event, prompt, base, pick), prompt)

    @precondition(lambda self: bool(self.sent))
    @rule(who=picks, back=st.integers(1, 3), tail=tails)
    def begin_of_an_older_version(self, who: int, back: int, tail: str) -> None:
        """Refused, when there is an older version."""
        key = self._pick_branch(who)
        branch = self.pair.model.live(*key)
        self.requests += 1
        if branch is not None and branch.version > back:
            prompt = chain(branch.prompt, tail)
            names = b"".join(prompt)
            self._begin(Begin(*key, f"q{self.requests}", branch.version - back, new_names=names), prompt)

    def _with_base(self, event: Begin, prompt: list[Name], base: str, pick: int) -> Begin:
        """Send only what follows a base that the directory may know."""
        blocks = 0
        owner = {"own": event.branch_id, "parent": event.parent_branch_id}.get(base)
        if owner is not None:
            branch = self.pair.model.live(event.tenant, owner)
            blocks = len(common_prefix(prompt, branch.context)) if branch is not None else 0
            blocks = max(0, blocks - pick) if pick < 4 else blocks
        elif base == "index":
            blocks = len(common_prefix(prompt, self._pick_text(pick)))
        elif base == "wrong" and prompt:
            blocks = 1 + pick % len(prompt)
        names = b"".join(prompt)
        fields = {name: getattr(event, name) for name in ("version", "parent_branch_id", "end_after", "body_digest")}
        base_name = b"" if blocks == 0 else prompt[blocks - 1]
        return Begin(
            *(event.tenant, event.branch_id, event.request_id),
            base_blocks=blocks,
            base_name=base_name,
            new_names=names[blocks * 16 :],
            **fields,
        )

    def _begin(self, event: Begin, prompt: list[Name]) -> None:
        outcome = self.pair.begin(event, prompt)
        self.saw(f"begin {outcome}")
        self.texts.append(prompt or self.texts[-1])
        self.prompts[(event.tenant, event.branch_id), event.request_id] = prompt
        self.sent.append(event)

    @precondition(lambda self: bool(self.sent))
    @rule(who=picks, pick=picks, other_body=st.booleans(), tail=st.sampled_from(["", "", "a"]))
    def begin_again(self, who: int, pick: int, other_body: bool, tail: str) -> None:
        """A request id once more: a replay, or another body under its name."""
        key = self._pick_branch(who)
        request_id, request = self._pick_request(key, pick)
        if request is None:
            return
        prompt = chain(request.prompt, tail)
        body = b"other" if other_body else request.body_digest
        version = request.version + (pick == 0)
        names = b"".join(prompt)
        event = Begin(*key, request_id, version, new_names=names, end_after=request.end_after, body_digest=body)
        self._begin(event, prompt)

    @precondition(lambda self: bool(self.sent))
    @rule(
        who=picks,
        pick=picks,
        phase=phases,
        node_id=nodes,
        first=st.sampled_from([0, 0, 0, 1, 16]),
        blocks=st.sampled_from([0, 1, 5, 17, 1000]),
        version=st.sampled_from([0, 0, 0, 0, 1, -1]),
    )
    def landed(self, who: int, pick: int, phase: Phase, node_id: str, first: int, blocks: int, version: int) -> None:
        """KV landed somewhere, perhaps of a run the node never announced."""
        key = self._pick_branch(who)
        request_id, request = self._pick_request(key, pick)
        given = (request.version if request is not None else 1) + version
        self._landed(Landed(*key, request_id, given, phase, node_id, blocks, first))

    def _landed(self, event: Landed) -> None:
        self.saw("landed" if self.pair.landed(event) else "landed ignored")
        self.sent.append(event)

    @precondition(lambda self: bool(self.sent))
    @rule(
        who=picks,
        pick=picks,
        node_id=nodes,
        back=st.sampled_from([0, 0, 0, 1, 5, -1]),
        tail=tails,
        differs=st.sampled_from([False, False, False, True]),
    )
    def output(self, who: int, pick: int, node_id: str, back: int, tail: str, differs: bool) -> None:
        """Output that goes on where the context ends, or repeats some of it, leaves a gap, or is another text."""
        key = self._pick_branch(who)
        request_id, request = self._pick_request(key, pick)
        branch = self.pair.model.live(*key)
        context = branch.context if branch is not None else []
        first = max(0, len(context) - back)
        version = request.version if request is not None else 1
        if differs and 0 < first < len(context):  # all its blocks are other ones than the context's
            names = chain(context[: first - 1], "z" + (tail or "a"))[first:]
        else:
            names = chain(context, tail)[first:]
        if not names:
            event = Output(*key, request_id, version, node_id, first, b"")
            assert_raises_unchanged(self.pair, InvalidArgument, lambda: self.pair.core.output(self.pair.now_s, event))
            return
        self._output(Output(*key, request_id, version, node_id, first, b"".join(names)))

    def _output(self, event: Output) -> None:
        self.saw("output" if self.pair.output(event) else "output ignored")
        self.sent.append(event)

    @precondition(lambda self: bool(self.sent))
    @rule(who=picks, pick=picks)
    def done(self, who: int, pick: int) -> None:
        """A request is over."""
        key = self._pick_branch(who)
        request_id, _ = self._pick_request(key, pick)
        self._done((*key, request_id))

    def _done(self, event: tuple[str, str, str]) -> None:
        taken = self.pair.done(*event)
        self.saw("done ignored" if not taken else "done")
        if taken and self.pair.model.live(*event[:2]) is None:
            self.saw("ended after its request")
        self.sent.append(event)

    @rule(key=branches, more=st.sampled_from([[], ["a"], ["b", "b", "x"]]), subtree=st.booleans())
    def end(self, key: Key, more: list[str], subtree: bool) -> None:
        """Branches end, some not for the first time, some that never were."""
        ended = self.pair.end(key[0], [key[1], *more], subtree)
        self.saw(f"end of {min(len(ended), 3)}" + (" with subtree" if subtree else ""))

    @rule(pick=st.integers(0, 200))
    def redeliver(self, pick: int) -> None:
        """An earlier event arrives once more, whatever happened since."""
        if not self.sent:
            return
        event = self.sent[-1 - pick % len(self.sent)]
        if isinstance(event, Begin):
            prompt = self.prompts[(event.tenant, event.branch_id), event.request_id]
            if len(prompt) == event.base_blocks + len(event.new_names) // 16:
                self._begin(event, prompt)
        elif isinstance(event, Landed):
            self._landed(event)
        elif isinstance(event, Output):
            branch = self.pair.model.live(event.tenant, event.branch_id)
            path = self.pair.paths.get(event.names[:16])
            if branch is None or path is None or branch.context[: event.first_block] == path[: event.first_block]:
                self._output(event)  # else: of another request that had the same id, before that was forgotten
        else:
            self._done(event)
        self.saw("redelivered")

    @rule(key=branches, tail=tails, output=tails, prefill=nodes, decode=nodes, ends=st.booleans())
    def turn(self, key: Key, tail: str, output: str, prefill: str, decode: str, ends: bool) -> None:
        """A whole request as it goes when nothing goes wrong: stored and landed on P, on D, output on D, over."""
        if {prefill, decode} <= self.pair.model.nodes.keys():
            self._serve(key, tail or "a", output, prefill, decode, ends)

    def _serve(self, key: Key, tail: str, output: str, prefill: str, decode: str, ends: bool, version: int = 0) -> None:
        self.requests += 1
        request_id = f"q{self.requests}"
        prompt = self._prompt(key, "context", 0, 0, tail)
        self._begin(Begin(*key, request_id, version, new_names=b"".join(prompt), body_digest=b"body"), prompt)
        branch = self.pair.model.live(*key)
        version = branch.version if branch is not None else 1
        for phase, node_id in ((Phase.PREFILL, prefill), (Phase.DECODE, decode)):
            self._send(node_id, [Stored(tier, run_ref(prompt, 0, len(prompt))) for tier in Tier])
            self._landed(Landed(*key, request_id, version, phase, node_id, len(prompt)))
        context = chain(prompt, output)
        self.pair.remember(context)
        if output:
            self._send(decode, [Stored(Tier.L2, run_ref(context, len(prompt), len(context)))])
            names = b"".join(context[len(prompt) :])
            self._output(Output(*key, request_id, version, decode, len(prompt), names))
        if ends:
            self._done((*key, request_id))

    @rule(seconds=st.sampled_from([0.0, 1.0, 30.0, 59.0, 61.0, 101.0, 151.0]), settle=st.booleans())
    def advance(self, seconds: float, settle: bool) -> None:
        """Time passes."""
        before = len(self.pair.model.branches)
        if self.pair.advance(seconds, settle):
            self.saw("expired")
        if len(self.pair.model.branches) < before:
            self.saw("tombstone forgotten")

    # ----------------------------------------------------------------------------------------------------------- nodes

    def _start(self, node_id: str, next_sequence: int = 0) -> None:
        self.incarnations += 1
        self.pair.node_up(node_id, f"i{self.incarnations}", next_sequence)
        self.sequences[node_id] = 0
        self.really[node_id] = {tier: set() for tier in Tier}
        self.snapshots.pop(node_id, None)

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

    def _send(self, node_id: str, events: list[NodeEvent]) -> None:
        """The node's next batch."""
        self.sequences[node_id] += 1
        for event in events:
            held = self.really[node_id][event.tier]
            if isinstance(event, Cleared):
                held.clear()
            elif isinstance(event, Stored):
                held.update(split_names(event.run.names)[event.run.skip :])
            else:
                held.difference_update(split_names(event.run.names)[event.run.skip :])
        self.saw(f"batch {self.pair.node_events(node_id, self.sequences[node_id], events)}")

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
        if mattered and rule_ is DecodeToPrefill.RESET:
            self.really[node_id] = {tier: set() for tier in Tier}
        self.saw(f"switch to prefill, {rule_}" if mattered else "switch without effect")

    # --------------------------------------------------------------------------------------------------------- compare

    @rule(pick=picks, cut=cuts, tail=tails)
    def look(self, pick: int, cut: int, tail: str) -> None:
        """Match any context; see any block."""
        names = chain(self._pick_text(pick)[:cut], tail)
        self.pair.match(names)
        known = sorted(self.pair.paths)
        for name in (known[cut % len(known)], known[-1]) if known else ():
            self.pair.block(name)
        self.saw("look")

    @invariant()
    def agree(self) -> None:
        """After every event."""
        self.pair.compare()
        self.pair.match(self.texts[-1])

    def teardown(self) -> None:
        """When all branches end, nothing is counted anywhere; when all nodes go too, nothing is left."""
        pair = self.pair
        for tenant in ("t", "u"):
            pair.end(tenant, ["a", "b", "c", "d"], subtree=False)
        pair.compare()
        assert not any(pair.model.counts(phase) for phase in Phase)
        for node_id in pair.model.nodes:
            assert not pair.core.node_counts(node_id)
            if node_id not in pair.heard:
                assert not any(pair.pushed[node_id].values())
        for node_id in list(pair.model.nodes):
            pair.node_gone(node_id)
        pair.advance(1000.0, settle=True)
        pair.compare()
        stats = pair.core.stats()
        assert (stats.blocks, stats.runs, stats.live_branches, stats.tombstones) == (0, 0, 0, 0)


EVERYTHING = {
    *(f"begin {kind}" for kind in ("new", "extend", "rewrite", "side", "replay")),
    *(f"begin {code}" for code in ("BRANCH_ENDED", "STALE_VERSION", "REQUEST_CONFLICT")),
    *("landed", "landed ignored", "output", "output ignored", "done", "done ignored", "ended after its request"),
    *("end of 0", "end of 1", "end of 1 with subtree", "end of 2 with subtree", "redelivered", "expired"),
    *("tombstone forgotten", "node up", "node restarted", "node known", "node gone", "unknown node gone"),
    *("batch taken", "batch ignored", "batch gap", "batch unknown parent", "batch of an unknown node"),
    *("again ignored", "resync", "resync ended", "switch without effect", "look"),
    *(f"switch to prefill, {rule_}" for rule_ in DecodeToPrefill),
}


def _run(examples: int, steps: int, *more: Stage) -> None:
    run_state_machine_as_test(
        DirectoryMachine,
        settings=settings(
            derandomize=True,
            database=None,
            deadline=None,
            max_examples=examples,
            stateful_step_count=steps,
            phases=(Stage.generate, *more),
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.timeout(600)
def test_the_directory_does_what_the_rules_say() -> None:
    SEEN.clear()
    _run(250, 60)
    assert set(SEEN) >= EVERYTHING, EVERYTHING - set(SEEN)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_directory_does_what_the_rules_say_at_length() -> None:
    SEEN.clear()
    _run(400, 120, Stage.shrink)
    assert set(SEEN) >= EVERYTHING, EVERYTHING - set(SEEN)


assert ANCHOR_BLOCKS == 16, "the pieces above are made to meet the depths the index knows by name"
