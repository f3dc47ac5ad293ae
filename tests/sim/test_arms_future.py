"""No arm sees the future: what a request will generate is no part of what policies and planners see."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.arm_views import names
from sim.small import MACHINE

from evolving.core.decode_routing import DecodeNode
from evolving.core.planner import Split, SplitShape, assign
from evolving_sim.arms.arm import (
    Arm,
    Asked,
    DecodePolicy,
    Policies,
    PolicySetup,
    PrefillChoice,
    PrefillNode,
    PrefillPolicy,
)
from evolving_sim.arms.loads import NodeLoad
from evolving_sim.arms.named import ARMS
from evolving_sim.events import EventHeap, Priority
from evolving_sim.legs import Request
from evolving_sim.sim_cluster import SimCluster

BLOCK_TOKENS = MACHINE.block_tokens


@dataclass
class Recorded:
    """What an arm was asked and chose, in order."""

    asked: list[Asked] = field(default_factory=list)
    chosen: list[tuple[float, str, str]] = field(default_factory=list)


@dataclass
class RecordedPrefill:
    inner: PrefillPolicy
    log: Recorded

    def choose(self, asked: Asked, nodes: Sequence[PrefillNode], now_s: float) -> PrefillChoice:
        choice = self.inner.choose(asked, nodes, now_s)
        self.log.asked.append(asked)
        self.log.chosen.append((now_s, asked.context.request_id, f"{choice}"))
        return choice


@dataclass
class RecordedDecode:
    inner: DecodePolicy
    log: Recorded

    def choose(self, asked: Asked, nodes: Sequence[DecodeNode], now_s: float) -> str:
        choice = self.inner.choose(asked, nodes, now_s)
        self.log.asked.append(asked)
        self.log.chosen.append((now_s, asked.context.request_id, choice))
        return choice


def recorded(arm: Arm, log: Recorded) -> Arm:
    def policies(setup: PolicySetup) -> Policies:
        made = arm.policies(setup)
        return Policies(RecordedPrefill(made.prefill, log), RecordedDecode(made.decode, log), made.controller)

    return replace(arm, policies=policies)


@dataclass(frozen=True)
class Turn:
    """A request of one of three agents, whose context grows by so much each time."""

    agent: int
    after_s: float
    new_tokens: int
    output_tokens: int


TURNS = st.lists(
    st.builds(Turn, st.integers(0, 2), st.floats(0.0, 3.0), st.integers(1, 600), st.integers(1, 80)),
    min_size=1,
    max_size=8,
)


def play(arm: Arm, turns: Sequence[Turn]) -> Recorded:
    """What an arm chooses when these come one after another, to when all is answered."""
    log, events = Recorded(), EventHeap()
    node_ids = ["n0", "n1", "n2", "n3"]
    split = Split(1, assign(SplitShape(2, 2), {}, node_ids))
    cluster = SimCluster(events, dict.fromkeys(node_ids, MACHINE), split, recorded(arm, log))
    if cluster.policies.controller is not None:
        cluster.policies.controller.begin(events, cluster)
    contexts = dict.fromkeys(range(3), 0)
    answered: list[int] = []
    at_s = 0.0
    for number, turn in enumerate(turns):
        at_s += turn.after_s
        shared = contexts[turn.agent]
        contexts[turn.agent] += turn.new_tokens
        prompt = contexts[turn.agent]
        request = Request(
            request_id=f"r{number}",
            kind="test",
            agent_id=f"a{turn.agent}",
            branch_id=f"a{turn.agent}",
            parent_branch_id="",
            version=1,
            names=names(f"a{turn.agent}", (prompt + turn.output_tokens) // BLOCK_TOKENS + 1),
            shared_blocks=shared // BLOCK_TOKENS,
            prompt_tokens=prompt,
            output_tokens=turn.output_tokens,
            sent_s=at_s,
            on_done=partial(answered.append, number),
        )
        events.at(at_s, Priority.ARRIVAL, partial(cluster.submit, request))
    events.run_until(at_s + 300.0)
    assert sorted(answered) == list(range(len(turns)))
    return log


def until_chosen(log: Recorded, request_id: str) -> list[tuple[float, str, str]]:
    """All choices up to the decode node of a request: nothing of its answer is there yet."""
    last = max(place for place, (_, each, _) in enumerate(log.chosen) if each == request_id)
    return log.chosen[: last + 1]


@pytest.mark.parametrize("name", ARMS)
@settings(max_examples=10, deadline=None)
@given(turns=TURNS, other=st.integers(2, 80))
def test_equal_pasts_with_other_futures_give_equal_choices(name: str, turns: list[Turn], other: int) -> None:
    """The last request generates something else: no choice before its first token is another one."""
    turns = [*turns[:-1], replace(turns[-1], output_tokens=max(2, turns[-1].output_tokens))]
    last = f"r{len(turns) - 1}"
    chosen = until_chosen(play(ARMS[name], turns), last)
    assert until_chosen(play(ARMS[name], [*turns[:-1], replace(turns[-1], output_tokens=other)]), last) == chosen


@pytest.mark.parametrize("name", ARMS)
def test_what_policies_are_asked_says_nothing_of_the_answer(name: str) -> None:
    turns = [Turn(agent, 0.5, 300, 40) for agent in (0, 1, 0, 2, 1, 0)]
    log = play(ARMS[name], turns)
    prompts = {
        f"r{number}": sum(each.new_tokens for each in turns[: number + 1] if each.agent == turn.agent)
        for number, turn in enumerate(turns)
    }
    assert {asked.context.request_id for asked in log.asked} == prompts.keys()
    for asked in log.asked:
        assert asked.context.tokens == prompts[asked.context.request_id]
        assert len(asked.names) == asked.context.tokens // BLOCK_TOKENS
        assert math.isinf(asked.context.output_tokens_max)


@pytest.mark.parametrize("seen", [Asked, PrefillNode, NodeLoad])
def test_what_they_see_has_no_place_for_it(seen: type) -> None:
    """No request, no workload, no output: only these."""
    allowed = {
        Asked: {"context", "agent_id", "branch_id", "parent_branch_id", "names"},
        PrefillNode: {"view", "prefilling", "open_requests"},
        NodeLoad: {
            "node_id",
            "role",
            "awaiting_tokens",
            "prompts_tokens",
            "decoding",
            "context_tokens",
            "l1_tokens",
        },
    }
    assert {each.name for each in fields(seen)} == allowed[seen]


def all_chosen() -> str:
    """A digest of what every arm chooses."""
    turns = [Turn(number % 3, 0.4, 100 + 50 * (number % 4), 10 + number) for number in range(12)]
    chosen = {name: play(arm, turns).chosen for name, arm in ARMS.items()}
    return hashlib.sha256(repr(chosen).encode()).hexdigest()


def test_every_arm_chooses_the_same_in_any_process() -> None:
    command = [sys.executable, "-c", "from sim.test_arms_future import all_chosen; print(all_chosen())"]
    tests = str(Path(__file__).resolve().parents[1])
    told = [
        subprocess.run(
            command,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": tests},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    ]
    assert told == [all_chosen()] * 2
