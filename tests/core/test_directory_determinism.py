"""The same events give the same effects in the same order, whatever a process's hash seed is: what a standby replays is
what the active directory did, and a simulation repeats."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

from evolving.core.config import DirectoryConfig
from evolving.core.directory import Directory
from evolving.core.directory_types import Begin, Landed, Output, Removed, RunRef, Stored
from evolving.core.errors import CoreError
from evolving.core.terms import Phase, Role, Tier

NODES = ("n0", "n1", "n2")
EVENTS = 400


def extended(names: bytes, letters: str) -> bytes:
    """A context with one more block a letter."""
    for letter in letters:
        names += hashlib.sha256(names[-16:] + letter.encode()).digest()[:16]
    return names


class Life:
    """Many events of few branches and nodes, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.directory = Directory(DirectoryConfig(idle_ttl_s=50.0, request_ttl_s=40.0, sweep_runs_per_tick=3))
        self.contexts: dict[str, bytes] = {}
        self.requests: dict[str, str] = {}
        self.sequence = dict.fromkeys(NODES, 0)
        for node_id in NODES:
            self.directory.node_up(0.0, node_id, "life")

    def step(self, number: int) -> object:
        """One event; what was said to it."""
        rng, directory, now_s = self.rng, self.directory, float(number)
        branch, node_id, kind = f"{rng.choice('abcd')}{number // 100}", rng.choice(NODES), rng.randrange(9)
        context, request = self.contexts.get(branch), self.requests.get(branch, "")
        if kind < 2 or context is None:
            start = context if context is not None else rng.choice([b"", *self.contexts.values()])
            self.contexts[branch] = extended(start, rng.choice(["x", "yy", "z" * 17]))
            self.requests[branch] = f"r{number}"
            return directory.begin(now_s, Begin("t", branch, f"r{number}", new_names=self.contexts[branch]))
        blocks = len(context) // 16
        if kind < 4:
            self.sequence[node_id] += 1
            run, tier = RunRef(0, context), rng.choice(list(Tier))
            change = Removed(tier, run) if rng.random() < 0.3 else Stored(tier, run)
            return directory.node_events(now_s, node_id, "life", self.sequence[node_id], [change])
        if kind < 6:
            phase, landed = rng.choice(list(Phase)), rng.randrange(blocks + 1)
            return directory.landed(now_s, Landed("t", branch, request, 1, phase, node_id, landed))
        if kind == 6:
            self.contexts[branch] = extended(context, "o")
            name = self.contexts[branch][-16:]
            return directory.output(now_s, Output("t", branch, request, 1, node_id, blocks, name))
        if kind == 7:
            return directory.request_done(now_s, "t", branch, request)
        if rng.random() < 0.1:
            return directory.end(now_s, "t", sorted(self.contexts))
        return directory.role_switch(now_s, node_id, Role.DECODE, Role.PREFILL) + directory.tick(now_s)


def told(seed: int) -> list[str]:
    """All that a life's directory said, and its state in the end."""
    life = Life(seed)
    said = []
    for number in range(EVENTS):
        try:
            said.append(repr(life.step(number)))
        except CoreError as error:
            said.append(repr(error))
    directory = life.directory
    return [*said, repr([directory.stats(), directory.branches(float(EVENTS)), directory.audit()])]


def test_lives_are_full() -> None:
    """Else equal digests would say little."""
    said = "".join(told(0))
    for what in ("CountUpdate", "EndedBranch", "FreeL1", "BeginKind.NEW", "BeginKind.EXTEND", "NodeDepth"):
        assert what in said, what


def test_effects_do_not_depend_on_the_hash_seed() -> None:
    digests = set()
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, Path(__file__)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        )
        digests.add(done.stdout)
    assert len(digests) == 1
    assert len(set(digests.pop().split())) == 5, "different lives differ"


if __name__ == "__main__":
    print(*(hashlib.sha256("".join(told(seed)).encode()).hexdigest() for seed in range(5)))
