"""The directory beside a naive model, under any order of any events (§4.1 of arXiv 2611.12304).

Events of different branches and nodes come in any order, early, late, twice and never. After each, everything both can
be asked is compared.
"""

from __future__ import annotations

import pytest
from core.machine_restarts import RestartRules
from core.machine_world import BRANCHES, SEEN, bases, branches, cuts, nodes, phases, picks, shapes, tails
from core.model import Key, Name
from core.pair import assert_raises_unchanged, chain
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Stage
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from evolving.core.config import DecodeToPrefill
from evolving.core.directory_types import Begin, Landed, Output
from evolving.core.errors import InvalidArgument
from evolving.core.terms import Phase


class DirectoryMachine(RestartRules):
    """The rules about branches; those about nodes and restarts are inherited."""

    # -------------------------------------------------------------------------------------------------------- branches

    @rule(
        who=picks,
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
        who: int,
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
        key = self._pick_branch(who) if who < 7 else BRANCHES[who % len(BRANCHES)]
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
        names, end_after = b"".join(prompt), request.end_after ^ (pick == 1)
        event = Begin(*key, request_id, version, new_names=names, end_after=end_after, body_digest=body)
        self._begin(event, prompt)

    @precondition(lambda self: bool(self.sent))
    @rule(who=picks, tail=tails, seconds=st.sampled_from([0.0, 1.0]), phase=phases, node_id=nodes)
    def side_request(self, who: int, tail: str, seconds: float, phase: Phase, node_id: str) -> None:
        """Another context of a version that runs; it lands and makes output, to no effect."""
        key = self._pick_branch(who)
        branch = self.pair.model.live(*key)
        if branch is None or not branch.prompt:
            return
        prompt = chain(branch.prompt[:-1], "y" + tail)
        request_id = self._begin_next(key, prompt)
        self.pair.advance(seconds, settle=False)
        version = branch.version
        self._landed(Landed(*key, request_id, version, phase, node_id, len(prompt)))
        output = chain(prompt, "w" + tail)
        self._output(Output(*key, request_id, version, node_id, len(prompt), b"".join(output[len(prompt) :])))

    def _begin_next(self, key: Key, prompt: list[Name], version: int = 0, parent: str = "") -> str:
        """Another request of a branch; returns its id."""
        self.requests += 1
        request_id = f"q{self.requests}"
        self._begin(Begin(*key, request_id, version, parent, new_names=b"".join(prompt)), prompt)
        return request_id

    @precondition(lambda self: bool(self.sent))
    @rule(who=picks, tail=tails)
    def rewrite_beside_an_older_version(self, who: int, tail: str) -> None:
        """A request of an older version runs on, which makes no side request of one of the current version."""
        key = self._pick_branch(who)
        branch = self.pair.model.live(*key)
        if branch is not None:
            self._begin_next(key, branch.prompt)
            self._done((*key, self._begin_next(key, chain(branch.prompt, "x"), branch.version + 1)))
            self._begin_next(key, chain(branch.prompt[:-1], "y" + tail))

    @precondition(lambda self: bool(self.sent))
    @rule(who=picks, turns=st.integers(2, 4))
    def requests_of_long_ago(self, who: int, turns: int) -> None:
        """More finished requests than are remembered, and then each once more."""
        key = self._pick_branch(who)
        branch = self.pair.model.live(*key)
        if branch is None:
            return
        prompt, request_ids = branch.prompt, []
        for _ in range(turns):
            request_ids.append(self._begin_next(key, prompt))
            self._done((*key, request_ids[-1]))
        for request_id in request_ids:
            self._begin(Begin(*key, request_id, new_names=b"".join(prompt)), prompt)

    @precondition(lambda self: bool(self.sent))
    @rule(who=picks, child=branches, tail=tails, ends=st.sampled_from([[False], [True], [False, True]]))
    def family(self, who: int, child: Key, tail: str, ends: list[bool]) -> None:
        """A branch whose parent ends: alone, with all that descends from it, or first one and then the other."""
        key = self._pick_branch(who)
        branch = self.pair.model.live(*key)
        if branch is not None and child[0] == key[0]:
            self._begin_next(child, chain(branch.prompt, tail), parent=key[1])
            for subtree in ends:
                self.end(key, [], subtree=subtree)

    @precondition(lambda self: bool(self.sent))
    @rule(who=picks, pick=picks, base=bases, output=tails)
    def rematch(self, who: int, pick: int, base: str, output: str) -> None:
        """A request lost its node."""
        key = self._pick_branch(who)
        request_id, request = self._pick_request(key, pick)
        context = chain(request.prompt if request is not None else self._pick_text(pick), output)
        self.pair.remember(context)
        self.pair.rematch(self._with_base(Begin(*key, request_id), context, base, pick), context)
        self.saw("rematch")

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

    @precondition(lambda self: bool(self.sent))
    @rule(who=picks, pick=picks)
    def done(self, who: int, pick: int) -> None:
        """A request is over."""
        key = self._pick_branch(who)
        request_id, _ = self._pick_request(key, pick)
        self._done((*key, request_id))

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

    @rule(
        key=branches,
        tail=tails,
        output=tails,
        prefill=nodes,
        decode=nodes,
        end=st.sampled_from(["open", "done", "last"]),
    )
    def turn(self, key: Key, tail: str, output: str, prefill: str, decode: str, end: str) -> None:
        """A whole request as it goes when nothing goes wrong: stored and landed on P, on D, output on D, over."""
        if {prefill, decode} <= self.pair.model.nodes.keys():
            self._serve(key, tail or "a", output, prefill, decode, end)

    @rule(seconds=st.sampled_from([0.0, 1.0, 30.0, 59.0, 61.0, 101.0, 151.0]), settle=st.booleans())
    def advance(self, seconds: float, settle: bool) -> None:
        """Time passes."""
        before = len(self.pair.model.branches)
        if self.pair.advance(seconds, settle):
            self.saw("expired")
        if len(self.pair.model.branches) < before:
            self.saw("tombstone forgotten")

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
    *("end of 0", "end of 1", "end of 1 with subtree", "end of 2 with subtree", "redelivered", "expired", "rematch"),
    *("tombstone forgotten", "node up", "node restarted", "node known", "node gone", "unknown node gone"),
    *("batch taken", "batch ignored", "batch gap", "batch unknown parent", "batch of an unknown node"),
    *("again ignored", "resync", "resync ended", "switch without effect", "look"),
    *(f"switch to prefill, {rule_}" for rule_ in DecodeToPrefill),
    *("restart from the log alone", "restart from a snapshot", "compacted", "restart, then all resynced"),
    *("crash before the append", "crash after ends"),
    *(f"restart after {what}" for what in ("switch", "fork", "family", "base of copies")),
}


def _run(examples: int, steps: int, *more: Stage) -> None:
    run_state_machine_as_test(
        DirectoryMachine,
        settings=settings(
            derandomize=True,
            database=None,
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
    _run(150, 60)
    assert set(SEEN) >= EVERYTHING, EVERYTHING - set(SEEN)


@pytest.mark.deep
@pytest.mark.timeout(1800)
def test_the_directory_does_what_the_rules_say_at_length() -> None:
    SEEN.clear()
    _run(400, 120, Stage.shrink)
    assert set(SEEN) >= EVERYTHING, EVERYTHING - set(SEEN)
