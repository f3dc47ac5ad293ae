"""Play one agent's session on a real cluster of this machine and show, turn by turn, what became of its KV.

    demo.py [--keep] [--nodes 3] [--engine sglang]

Starts etcd, the four services and three nodes, plays session.py through the client, reads the counts after every turn
from the directory, switches a node's role in the middle of one turn, ends the branches and audits. Writes
build/demo.json. `--keep` leaves the cluster running.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import grpc
import numpy as np
import session
import typer
from cluster import DEFAULT_MODEL, DEFAULT_STATE, ROOT, ClusterError, ClusterSpec, LocalCluster
from control import next_steps
from rich.console import Console
from rich.markup import escape

from evolving.core.blocks import chain_names, reusable_blocks, root_digest, split_names
from evolving.internal.v1 import node_agent_pb2, node_agent_pb2_grpc
from evolving.runtime.clock import SystemClock
from evolving.runtime.etcd import EtcdStore
from evolving.runtime.keys import Keys, NodeRegistration, decode
from evolving.runtime.log import configure
from evolving.v1 import common_pb2, directory_pb2, directory_pb2_grpc, planner_pb2, planner_pb2_grpc
from evolving_client import Branch, Client, EvolvingError, Finished, Tokens
from evolving_gateway.tokens import Message, Tokenizer

OUTPUT = ROOT / "build" / "demo.json"
MAX_TOKENS = 48
RPC_TIMEOUT_S = 20.0
WAIT_S = 5.0
SWITCH_WITHIN_S = 60.0
console = Console(width=140, soft_wrap=False)


@dataclass(slots=True)
class Story:
    """One branch as the demo follows it."""

    branch: Branch
    names: list[bytes] = field(default_factory=list)  # blocks of the context after its last turn
    prompt_tokens: int = 0  # of the last turn
    output_tokens: int = 0
    prefill_node: str = ""


class Demo:
    """The session, the reads beside it and the rows that come of them."""

    def __init__(
        self, cluster: LocalCluster, client: Client, channels: dict[str, grpc.aio.Channel], root: bytes
    ) -> None:
        self.cluster, self.client, self.channels, self.root = cluster, client, channels, root
        self.directory = directory_pb2_grpc.DirectoryServiceStub(channels["directory"])
        self.planner = planner_pb2_grpc.PlannerServiceStub(channels["planner"])
        self.tokenizer = Tokenizer(cluster.spec.model_path)
        self.block_tokens = 0
        self.turns: list[dict[str, Any]] = []
        self.switch: dict[str, Any] = {}

    # -- the session

    async def play(self) -> dict[str, Any]:
        """Play it all. Returns what build/demo.json holds."""
        self.block_tokens = (await self.client.models())[0].block_tokens
        main = Story(self.client.branch("main"))
        start = [{"role": "system", "content": session.SYSTEM}, {"role": "user", "content": session.TASK}]
        await self.turn("root", main, start)
        await self.turn("tool", main, _tool(0))
        await self.turn("tool", main, _tool(1), during=lambda: self.switch_role(main.prefill_node))
        fork = replace(main, branch=main.branch.fork("fork"))
        await self.turn("fork", fork, [{"role": "user", "content": session.FORK_TASK}])
        helper = Story(main.branch.subagent("subagent"))
        task = [
            {"role": "system", "content": session.SUBAGENT_SYSTEM},
            {"role": "user", "content": session.SUBAGENT_TASK},
        ]
        await self.turn("subagent", helper, task)
        await self.switch_back()
        console.print(f"     [dim]{WAIT_S:.0f} s pass; the agent waits for a tool[/dim]", highlight=False)
        await asyncio.sleep(WAIT_S)
        await self.turn("resume", main, _tool(2))
        await self.end(fork, helper)
        main.branch.compact([start[0], {"role": "user", "content": session.COMPACTED}])
        await self.turn("compaction", main, [{"role": "user", "content": session.NEXT_STEP}])
        await self.end(main)
        return {
            "block_tokens": self.block_tokens,
            "turns": self.turns,
            "switch": self.switch,
            "audit": await self.audit(),
        }

    async def turn(self, event: str, story: Story, append: list[dict[str, str]], during: Any = None) -> None:
        """One request of a branch, and what the directory says of its blocks afterwards."""
        branch, old = story.branch, story.names
        generation = branch.generate(append=append, max_tokens=MAX_TOKENS)
        side: asyncio.Task[None] | None = None
        finished: Finished | None = None
        async for item in generation:
            if during and side is None and isinstance(item, Tokens):
                side = asyncio.create_task(during())
            if isinstance(item, Finished):
                finished = item
        assert finished, "a generation ends with it or with an error"
        if side:
            await side
        prompt = await self.tokenizer.encode_chat(_last_prompt(branch))
        prompt_bytes = prompt.astype("<u4").tobytes()
        assert len(prompt) == finished.usage.prompt_tokens, "the demo and the gateway tokenise alike"
        names = self.names(prompt_bytes)
        shared_tokens = _common(old, names) * self.block_tokens
        most = reusable_blocks(story.prompt_tokens, story.output_tokens, self.block_tokens, len(prompt))
        reusable = min(most * self.block_tokens, shared_tokens)
        output = b"".join(token.to_bytes(4, "little") for token in finished.output_token_ids)
        story.names = self.names(prompt_bytes + output[:-4])
        story.prompt_tokens, story.output_tokens = len(prompt), len(finished.output_token_ids)
        story.prefill_node = finished.prefill_node_id
        counts = await self.counts([*story.names, *(name for name in old if name not in set(story.names))])
        self.record(event, branch, finished, reusable, counts)

    def names(self, tokens: bytes) -> list[bytes]:
        """Names of the whole blocks of token ids."""
        return split_names(chain_names(self.root, tokens, self.block_tokens))

    async def end(self, *stories: Story) -> None:
        """End branches and show what is left counted of their blocks."""
        for story in stories:
            await story.branch.end()
            counts = await self.counts(story.names)
            self.record("end", story.branch, None, 0, counts)

    # -- the switch

    async def switch_role(self, node: str) -> None:
        """Give a node the other role while requests run, and wait until it has served a request in that role."""
        view = await self.planner.GetSplit(planner_pb2.GetSplitRequest(), timeout=RPC_TIMEOUT_S)
        before = {each.node_id: each.role for each in view.nodes}[node]
        after = common_pb2.ROLE_DECODE if before == common_pb2.ROLE_PREFILL else common_pb2.ROLE_PREFILL
        starts = await self.engine_starts(node)
        began = time.monotonic()
        await self.propose({node: after}, "the demo switches a node in the middle of a turn")
        failed = 0
        async with asyncio.timeout(SWITCH_WITHIN_S):
            while True:
                try:
                    served = await self.client.generate(text=session.BACKGROUND, max_tokens=4).finish()
                except EvolvingError:
                    failed += 1
                    continue
                if node == (served.decode_node_id if after == common_pb2.ROLE_DECODE else served.prefill_node_id):
                    break
        self.switch = {
            "node": node,
            "from": _role(before),
            "to": _role(after),
            "seconds": round(time.monotonic() - began, 3),
            "failed_requests": failed,
            "restarted": await self.engine_starts(node) != starts,
        }

    async def switch_back(self) -> None:
        """Return the switched node to its first role."""
        await self.propose({self.switch["node"]: _ROLES[self.switch["from"]]}, "and switches it back")

    async def propose(self, roles: dict[str, common_pb2.Role.ValueType], reason: str) -> None:
        """Set roles by an operator's will."""
        changes = planner_pb2.RoleChanges(roles=roles)
        request = planner_pb2.ProposeSplitRequest(changes=changes, reason=reason)
        await self.planner.ProposeSplit(request, timeout=RPC_TIMEOUT_S)

    async def engine_starts(self, node: str) -> tuple[int, int]:
        """How often a node's engine was started, and its process."""
        stub = node_agent_pb2_grpc.NodeAgentServiceStub(self.channels[node])
        request = node_agent_pb2.WatchStatusRequest(partition_id=self.cluster.spec.partition_id)
        stream = stub.WatchStatus(request, timeout=RPC_TIMEOUT_S)
        async for status in stream:
            stream.cancel()
            return status.engine_starts, status.engine_pid
        raise AssertionError("the status stream ended without a status")

    # -- reads

    async def counts(self, names: list[bytes]) -> dict[str, int]:
        """Of these blocks: held by a branch, by two or more (PREFILL counts over nodes), kept but needed by none."""
        out = {"shared_blocks": 0, "zero_blocks": 0, "held_blocks": 0}
        for name in names:
            try:
                block = await self.directory.GetBlock(directory_pb2.GetBlockRequest(name=name), timeout=RPC_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
                continue
            prefill = sum(copy.prefill_count for copy in block.copies)
            held = prefill + sum(copy.decode_count for copy in block.copies) > 0
            out["shared_blocks"] += prefill >= 2
            out["held_blocks"] += held
            out["zero_blocks"] += not held and bool(block.copies)
        return out

    async def audit(self) -> dict[str, int]:
        """All three counts of every block compared, after everything has ended."""
        reply = await self.directory.Audit(directory_pb2.AuditRequest(), timeout=60)
        return {"mismatches": reply.mismatch_count, "nonzero_after_end": reply.nonzero_after_end}

    def record(
        self, event: str, branch: Branch, finished: Finished | None, reusable: int, counts: dict[str, int]
    ) -> None:
        """Keep a row and show it."""
        row: dict[str, Any] = {
            "turn": len(self.turns) + 1,
            "branch": branch.id,
            "version": branch.version,
            "event": event,
            "prompt_tokens": finished.usage.prompt_tokens if finished else 0,
            "cached_tokens": finished.cached.total if finished else 0,
            "cached_from": {
                "l1": finished.cached.own_l1 if finished else 0,
                "l2": finished.cached.own_l2 if finished else 0,
                "peer": finished.cached.peer_l2 if finished else 0,
            },
            "computed_tokens": finished.usage.computed_tokens if finished else 0,
            "reusable_tokens": reusable,
            "prefill_node": finished.prefill_node_id if finished else "",
            "decode_node": finished.decode_node_id if finished else "",
            "ttft_s": round(finished.timings.ttft_s, 3) if finished else 0.0,
            "text": finished.text if finished else "",
            "counts": counts,
        }
        self.turns.append(row)
        show(row)


COLUMNS = (
    ("turn", 4), ("branch", -9), ("v", 2), ("event", -11), ("prompt", 6), ("l1", 5), ("l2", 5), ("peer", 5),
    ("computed", 8), ("reusable", 8), ("prefill", -7), ("decode", -7), ("ttft_s", 6), ("held", 4), ("shared", 6),
    ("zero", 4),
)  # fmt: skip
"""Heading and width; a negative one aligns left."""


def show(row: dict[str, Any]) -> None:
    """One line a turn, as it ends; a table could only be drawn at the end."""
    if row["turn"] == 1:
        console.print(_line([name for name, _ in COLUMNS]), style="bold")
    console.print(
        _line(
            [
                *(row[key] for key in ("turn", "branch", "version", "event", "prompt_tokens")),
                *row["cached_from"].values(),
                *(row[key] for key in ("computed_tokens", "reusable_tokens", "prefill_node", "decode_node", "ttft_s")),
                *(row["counts"][key] for key in ("held_blocks", "shared_blocks", "zero_blocks")),
            ]
        ),
        highlight=False,
    )
    if row["text"]:
        console.print(f"     [dim]{escape(' '.join(row['text'].split())[:120])}[/dim]", highlight=False)


def _line(cells: list[Any]) -> str:
    pairs = zip(cells, COLUMNS, strict=True)
    return " ".join(f"{cell:<{-width}}" if width < 0 else f"{cell:>{width}}" for cell, (_, width) in pairs)


def _tool(number: int) -> list[dict[str, str]]:
    return [{"role": "tool", "content": session.TOOL_RESULTS[number]}]


def _last_prompt(branch: Branch) -> list[Message]:
    """The prompt of the last turn: the branch's messages without the answer it just got."""
    return [
        Message(
            str(message["role"]),
            str(message["content"]),
            np.array(message["token_ids"], np.uint32) if "token_ids" in message else None,
        )
        for message in branch.messages[:-1]
    ]


def _common(old: list[bytes], new: list[bytes]) -> int:
    same = 0
    while same < min(len(old), len(new)) and old[same] == new[same]:
        same += 1
    return same


_ROLES = {"prefill": common_pb2.ROLE_PREFILL, "decode": common_pb2.ROLE_DECODE, "mixed": common_pb2.ROLE_MIXED}


def _role(role: common_pb2.Role.ValueType) -> str:
    return next(name for name, value in _ROLES.items() if value == role)


async def kv_format(etcd_address: str, partition_id: str) -> str:
    """What the nodes' KV depends on besides tokens and tenant, as they registered it."""
    async with EtcdStore((etcd_address,), clock=SystemClock()) as store:
        listing = await store.list(Keys(partition=partition_id).nodes)
        return decode(NodeRegistration, listing.items[0].value).kv_format


@contextlib.asynccontextmanager
async def open_channels(cluster: LocalCluster) -> AsyncIterator[dict[str, grpc.aio.Channel]]:
    """A channel to every process of the cluster but etcd."""
    async with contextlib.AsyncExitStack() as stack:
        yield {
            name: await stack.enter_async_context(grpc.aio.insecure_channel(process.address))
            for name, process in cluster.processes.items()
            if name != "etcd"
        }


async def play(cluster: LocalCluster) -> dict[str, Any]:
    """Play the session on a running cluster."""
    root = root_digest(await kv_format(cluster.etcd_address, cluster.spec.partition_id), "", "default")
    async with Client(cluster.gateway_address, timeout_s=120) as client, open_channels(cluster) as channels:
        return await Demo(cluster, client, channels, root).play()


def summarise(result: dict[str, Any]) -> list[str]:
    """What failed to hold; empty when all is well."""
    problems = [
        f"turn {row['turn']}: reused {row['cached_tokens']} of {row['reusable_tokens']} tokens"
        for row in result["turns"]
        if row["cached_tokens"] < row["reusable_tokens"]
    ]
    if result["switch"].get("failed_requests") or result["switch"].get("restarted", True):
        problems.append(f"the switch was not clean: {result['switch']}")
    if any(result["audit"].values()):
        problems.append(f"the audit found {result['audit']}")
    return problems


def main(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the cluster running.")] = False,
    nodes: Annotated[int, typer.Option(help="How many nodes.")] = 3,
    engine: Annotated[str, typer.Option(help="sglang or mock.")] = "sglang",
    model_path: Annotated[Path, typer.Option(help="Directory of the model.")] = DEFAULT_MODEL,
    state_dir: Annotated[Path, typer.Option(help="Where logs and state go.")] = DEFAULT_STATE,
) -> None:
    """Play an agent's session on a cluster of this machine."""
    spec = ClusterSpec(state_dir=state_dir, nodes=nodes, engine=engine, model_path=model_path)
    configure("demo", level="warning")
    cluster = LocalCluster(spec, say=lambda line: console.print(f"  {line}", highlight=False))
    began = time.monotonic()
    console.print(
        f"Starting etcd, gateway, planner, directory and {nodes} nodes ({engine}); this takes a minute or two."
    )
    try:
        cluster.start()
    except ClusterError as error:
        console.print(f"demo: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
    started = time.monotonic()
    try:
        console.print(
            f"The cluster serves after {started - began:.0f} s. Now an agent's session, turn by turn (tokens, blocks):"
        )
        result = asyncio.run(play(cluster))
        OUTPUT.parent.mkdir(parents=True, exist_ok=True)
        OUTPUT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        report(result, time.monotonic() - started)
        if keep:
            console.print(next_steps(cluster), markup=False, highlight=False)
    except BaseException:
        keep = False
        raise
    finally:
        if not keep:
            killed = cluster.stop()
            console.print("Everything is stopped." + (f" Had to kill {', '.join(killed)}." if killed else ""))
    if summarise(result):
        raise typer.Exit(1)


def report(result: dict[str, Any], seconds: float) -> None:
    """What the session showed, in a few lines."""
    turns = [row for row in result["turns"] if row["event"] != "end"]
    cached, reusable = (sum(row[key] for row in turns) for key in ("cached_tokens", "reusable_tokens"))
    switch, audit = result["switch"], result["audit"]
    console.print(
        f"\n{len(turns)} turns in {seconds:.0f} s; {cached} prompt tokens reused where {reusable} were reusable.\n"
        f"{switch['node']} went from {switch['from']} to {switch['to']}: {switch['seconds']} s until it served a "
        f"request in its new role, {switch['failed_requests']} requests failed, "
        f"engine restarted: {switch['restarted']}.\n"
        f"After the ends: {audit['mismatches']} counts disagree, {audit['nonzero_after_end']} are left.\n"
        f"All of it is in {OUTPUT}.",
        highlight=False,
    )
    for problem in summarise(result):
        console.print(f"demo: {problem}", style="red", markup=False)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
