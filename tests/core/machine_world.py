"""The world of the directory's state machine: what there is to pick from, and how events are delivered.

Contexts are spelt with a handful of letters, so that forks, shared prefixes and rewrites meet all the time; pieces
around 16 blocks long, so that they meet at, before and after the depths the index knows by name.
"""

from __future__ import annotations

from collections import Counter

from core.model import Key, ModelRequest, Name, common_prefix, split_names
from core.pair import Pair, chain, run_ref
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize

from evolving.core.config import DecodeToPrefill, DirectoryConfig
from evolving.core.directory_types import Begin, Cleared, Landed, NodeEvent, Output, Stored
from evolving.core.terms import ANCHOR_BLOCKS, Phase, Tier

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
turn_ends = st.sampled_from(["open", "done", "last"])  # last: its Begin says end_after
bases = st.sampled_from(["full", "own", "parent", "index", "wrong"])

assert ANCHOR_BLOCKS == 16, "the pieces are made to meet the depths the index knows by name"


class World(RuleBasedStateMachine):
    """Branches, nodes and what they did, for rules to go on from."""

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
        self._serve(("t", "a"), "aaab", "cc", "n0", "n1", end="done")
        self._serve(("t", "b"), "aaa" + "b" * 30, "", "n0", "n1", end="open", version=2)

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

    # ------------------------------------------------------------------------------------------------------- deliveries

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

    def _landed(self, event: Landed) -> None:
        self.saw("landed" if self.pair.landed(event) else "landed ignored")
        self.sent.append(event)

    def _output(self, event: Output) -> None:
        self.saw("output" if self.pair.output(event) else "output ignored")
        self.sent.append(event)

    def _done(self, event: tuple[str, str, str]) -> None:
        taken = self.pair.done(*event)
        self.saw("done ignored" if not taken else "done")
        if taken and self.pair.model.live(*event[:2]) is None:
            self.saw("ended after its request")
        self.sent.append(event)

    def _serve(self, key: Key, tail: str, output: str, prefill: str, decode: str, end: str, version: int = 0) -> None:
        self.requests += 1
        request_id = f"q{self.requests}"
        prompt = self._prompt(key, "context", 0, 0, tail)
        names, last = b"".join(prompt), end == "last"
        self._begin(Begin(*key, request_id, version, new_names=names, end_after=last, body_digest=b"body"), prompt)
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
        if end != "open":
            self._done((*key, request_id))

    def _start(self, node_id: str, next_sequence: int = 0) -> None:
        self.incarnations += 1
        self.pair.node_up(node_id, f"i{self.incarnations}", next_sequence)
        self.sequences[node_id] = 0
        self.really[node_id] = {tier: set() for tier in Tier}
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
