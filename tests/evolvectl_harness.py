"""evolvectl run in the test's own process, and a planner for it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from scripted_cluster import ScriptedPlanner
from typer.testing import CliRunner

from evolving.v1 import common_pb2, planner_pb2
from evolving_client.ctl.app import app

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE


@dataclass
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its standard output as JSON."""
        return json.loads(self.out)

    @property
    def words(self) -> list[list[str]]:
        """Its standard output, words by line."""
        return [line.split() for line in self.out.splitlines() if line.strip()]


def evolvectl(*arguments: str, stdin: str = "") -> Outcome:
    """Run a command in this process."""
    result = CliRunner().invoke(app, arguments, input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)


def one_line(outcome: Outcome) -> str:
    """The error line, after checking that it is one."""
    assert re.fullmatch(r"evolvectl: [^\n]+\n", outcome.err), outcome.err
    return outcome.err


def scripted_planner() -> ScriptedPlanner:
    """Of two live nodes and one that is gone."""
    split = planner_pb2.Split(
        epoch=7,
        roles={"node-a": PREFILL, "node-b": DECODE, "node-z": DECODE},
        reason="because",
        author="operator:me",
        written_at_s=86400.0,
    )
    nodes = [
        planner_pb2.NodeView(node_id="node-a", role=PREFILL, address="10.0.0.1:1", incarnation="i"),
        planner_pb2.NodeView(node_id="node-b", role=common_pb2.ROLE_MIXED, address="10.0.0.2:1", incarnation="j"),
    ]
    return ScriptedPlanner(split=planner_pb2.GetSplitResponse(split=split, leader_address="10.0.0.9:1", nodes=nodes))
