"""Transcripts: sessions with the directory told in commands, and what each of them must say (see transcripts/*.txt)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from evolving.core.blocks import chain, names_of, root_digest, split_names
from evolving.core.directory import Directory
from evolving.core.directory_types import (
    Begin,
    CountUpdate,
    Effect,
    EndedBranch,
    FreeL1,
    Landed,
    Output,
    RunRef,
    Stored,
)
from evolving.core.errors import CoreError
from evolving.core.terms import NAME_BYTES, Phase, Role, Tier

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


def steps(transcript: str) -> Iterator[tuple[int, str, list[str]]]:
    """(line number, command, lines it must say)."""
    command, line_number, said = "", 0, list[str]()
    for number, raw in enumerate([*transcript.splitlines(), "> stop"], 1):
        line = raw.split("#")[0].strip()
        if line.startswith(">"):
            if command:
                yield line_number, command, said
            command, line_number, said = line[1:].strip(), number, []
        elif line:
            said.append(line)


class Session:
    """Carries out the commands of a transcript."""

    def __init__(self) -> None:
        self.directory = Directory()
        self.now_s = 0.0
        self.contexts: dict[tuple[str, str], str] = {}  # (branch, request) -> letters of prompt and output
        self.letters: dict[bytes, tuple[str, int]] = {}  # block name -> letter, depth
        self.held: dict[str, set[bytes]] = {}  # node -> names
        self.sequences: dict[str, int] = {}

    def names(self, letters: str) -> bytes:
        """A context's block names."""
        names = names_of(chain(root_digest("session", "", ""), letters.encode("utf-32-le"), 1))
        for depth, name in enumerate(split_names(names)):
            self.letters[name] = letters[depth], depth
        return names

    def run(self, command: str) -> list[str]:
        """One command; what it says."""
        verb, *words = command.split()
        try:
            said: list[str] = getattr(self, f"do_{verb}")(*words)
        except CoreError as error:
            return [error.code]
        finally:
            self.directory.check_invariants()
        return said

    def told(self, effects: list[Effect]) -> list[str]:
        """Effects in words: counts of adjacent blocks that are alike in one line, whatever runs they came in."""
        counted: list[tuple[str, int, str, int]] = []  # node, depth, letters, count
        said = []
        for effect in effects:
            if isinstance(effect, CountUpdate):
                blocks = [self.letters[name] for name in split_names(effect.names)]
                letters = "".join(letter for letter, _ in blocks)
                counted.append((effect.node_id, blocks[0][1], letters, effect.count))
            elif isinstance(effect, EndedBranch):
                said.append(f"ended {effect.branch_id}")
            else:
                assert isinstance(effect, FreeL1), effect
                said.append(f"{effect.node_id}: free L1")
        merged: list[tuple[str, int, str, int]] = []
        for node, depth, letters, count in sorted(counted):
            if merged and (*merged[-1][:1], merged[-1][1] + len(merged[-1][2]), merged[-1][3]) == (node, depth, count):
                merged[-1] = (node, merged[-1][1], merged[-1][2] + letters, count)
            else:
                merged.append((node, depth, letters, count))
        return said + [f"{node}: {letters}@{depth} = {count}" for node, depth, letters, count in merged]

    def store(self, node: str, names: bytes) -> None:
        """The node comes to hold a context in both tiers. That is no news of its counts; others with the same blocks
        hear that they are no longer alone."""
        blocks = len(names) // NAME_BYTES
        first = next((at for at, name in enumerate(split_names(names)) if name not in self.held[node]), blocks)
        if first == blocks:
            return
        self.held[node].update(split_names(names))
        self.sequences[node] += 1
        events = [Stored(tier, RunRef(0, names, first)) for tier in Tier]
        for effect in self.directory.node_events(self.now_s, node, "1", self.sequences[node], events):
            assert isinstance(effect, CountUpdate)
            assert effect.elsewhere
            assert effect.node_id != node

    def do_up(self, node: str) -> list[str]:
        self.held[node], self.sequences[node] = set(), 0
        return self.told(self.directory.node_up(self.now_s, node, "1"))

    def do_gone(self, node: str) -> list[str]:
        return self.told(self.directory.node_gone(self.now_s, node))

    def do_begin(self, branch: str, request: str, *more: str) -> list[str]:
        *options, letters = more
        given = dict(option.split("=") for option in options)
        answer, effects = self.directory.begin(
            self.now_s,
            Begin(
                "t",
                branch,
                request,
                version=int(given.get("v", 0)),
                parent_branch_id=given.get("parent", ""),
                new_names=self.names(letters),
            ),
        )
        self.contexts[branch, request] = letters
        where = f"{answer.prompt_blocks} blocks, {answer.match.pool_blocks} in the pool"
        return [f"{answer.kind}, version {answer.version}, {where}", *self.told(effects)]

    def version(self, branch: str) -> int:
        view = self.directory.branch(self.now_s, "t", branch)
        assert view is not None
        return view.version

    def do_land(self, branch: str, request: str, phase: str, node: str) -> list[str]:
        names = self.names(self.contexts[branch, request])
        self.store(node, names)
        landed = Landed(
            "t", branch, request, self.version(branch), Phase[phase.upper()], node, len(names) // NAME_BYTES
        )
        return self.told(self.directory.landed(self.now_s, landed))

    def do_output(self, branch: str, request: str, node: str, letters: str) -> list[str]:
        before = self.contexts[branch, request]
        self.contexts[branch, request] = before + letters
        names = self.names(before + letters)
        self.store(node, names)
        output = Output(
            "t", branch, request, self.version(branch), node, len(before), names[len(before) * NAME_BYTES :]
        )
        return self.told(self.directory.output(self.now_s, output))

    def do_done(self, branch: str, request: str) -> list[str]:
        return self.told(self.directory.request_done(self.now_s, "t", branch, request))

    def do_end(self, branch: str, subtree: str = "") -> list[str]:
        effects = self.directory.end(self.now_s, "t", [branch], subtree=bool(subtree))
        ends = [effect for effect in effects if isinstance(effect, EndedBranch)]
        return self.told([*ends, *(effect for effect in effects if effect not in ends)])

    def do_switch(self, node: str, old: str, new: str) -> list[str]:
        return self.told(self.directory.role_switch(self.now_s, node, Role[old.upper()], Role[new.upper()]))

    def do_wait(self, seconds: str) -> list[str]:
        self.now_s += float(seconds)
        return self.told(self.directory.tick(self.now_s))

    def do_counts(self, branch: str) -> list[str]:
        counts = self.directory.context_counts("t", branch)
        return [f"held {counts.held_blocks}, shared {counts.shared_blocks}, zero {counts.zero_blocks}"]

    def do_audit(self) -> list[str]:
        report = self.directory.audit()
        return [f"{report.mismatch_count} mismatches, {report.nonzero_after_end} counted without a branch"]


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    session = Session()
    for number, command, expected in steps(path.read_text()):
        said = session.run(command)
        assert sorted(said) == sorted(expected), f"{path.name}:{number}: {command}"
