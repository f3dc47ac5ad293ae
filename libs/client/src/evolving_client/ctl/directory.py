"""`evolvectl branch`, `block` and `audit`: what the directory knows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from evolving.v1 import common_pb2, directory_pb2
from evolving_client.ctl import output
from evolving_client.ctl.cluster import Cluster
from evolving_client.ctl.failure import usage
from evolving_client.ctl.plain import word

_NAME_BYTES = 16


async def list_branches(
    cluster: Cluster, tenant: str, include_ended: bool, limit: int
) -> tuple[list[common_pb2.Branch], bool]:
    """The first `limit` branches by tenant and id, and whether there are more."""
    branches: list[common_pb2.Branch] = []
    token = ""
    while True:
        request = directory_pb2.ListBranchesRequest(
            tenant=tenant,
            include_ended=include_ended,
            page_size=min(1000, limit + 1 - len(branches)),
            page_token=token,
        )
        answer = await cluster.call("directory", "ListBranches", request, directory_pb2.ListBranchesResponse)
        branches.extend(answer.branches)
        token = answer.next_page_token
        if not token or len(branches) > limit:
            return branches[:limit], bool(token) or len(branches) > limit


async def read_branch(cluster: Cluster, tenant: str, branch_id: str) -> common_pb2.Branch:
    """One branch."""
    request = directory_pb2.ReadBranchRequest(tenant=tenant, branch_id=branch_id)
    answer = await cluster.call("directory", "ReadBranch", request, directory_pb2.ReadBranchResponse)
    return answer.branch


async def read_block(cluster: Cluster, name_hex: str) -> directory_pb2.GetBlockResponse:
    """Where a block is. Raises Failure when `name_hex` is no block's name."""
    if not re.fullmatch(rf"[0-9a-fA-F]{{{2 * _NAME_BYTES}}}", name_hex):
        raise usage(f"a block's name is {2 * _NAME_BYTES} hex digits, not {name_hex!r}")
    request = directory_pb2.GetBlockRequest(name=bytes.fromhex(name_hex))
    return await cluster.call("directory", "GetBlock", request, directory_pb2.GetBlockResponse)


async def audit(cluster: Cluster) -> directory_pb2.AuditResponse:
    """Let the directory compare its counts."""
    return await cluster.call("directory", "Audit", directory_pb2.AuditRequest(), directory_pb2.AuditResponse)


def print_branches(branches: Sequence[common_pb2.Branch], truncated: bool) -> None:
    """One row a branch."""
    output.print_table(
        ["branch", "tenant", "state", ">version", ">prompt", ">output", ">held", ">shared", ">zero", ">running",
         ">idle", "parent"],
        [
            [
                branch.branch_id,
                branch.tenant,
                word(common_pb2.BranchState, branch.state),
                str(branch.version),
                str(branch.prompt_blocks),
                str(branch.output_blocks),
                str(branch.counts.held_blocks),
                str(branch.counts.shared_blocks),
                str(branch.counts.zero_blocks),
                str(branch.running_requests),
                output.seconds(branch.idle_s),
                branch.parent_branch_id or "-",
            ]
            for branch in branches
        ],
    )  # fmt: skip
    if truncated:
        output.print_line(f"only the first {len(branches)}; more with --limit")


def print_branch(branch: common_pb2.Branch) -> None:
    """A branch's facts, then where its blocks are counted."""
    counts = branch.counts
    facts = [
        ("tenant", branch.tenant),
        ("state", word(common_pb2.BranchState, branch.state)),
        ("version", str(branch.version)),
        ("parent", branch.parent_branch_id or "-"),
        ("children", ", ".join(branch.child_branch_ids) or "-"),
        ("context", f"{branch.prompt_blocks} blocks of prompt, {branch.output_blocks} of output"),
        ("counts", f"{counts.held_blocks} held, {counts.shared_blocks} shared, {counts.zero_blocks} zero"),
        ("running", f"{branch.running_requests} requests"),
        ("idle", output.seconds(branch.idle_s)),
        ("rewrites", f"{branch.unannounced_rewrites} without a new version"),
    ]
    output.print_line(f"branch {branch.branch_id}")
    for name, value in facts:
        output.print_line(f"  {name:<9} {value}")
    output.print_table(
        ["phase", "node", ">first block", ">blocks"],
        [
            [word(common_pb2.Phase, home.phase), home.node_id, str(home.first_block), str(home.blocks)]
            for home in branch.homes
        ],
    )


def print_block(name_hex: str, block: directory_pb2.GetBlockResponse) -> None:
    """A block's copies, and the branches that have it."""
    output.print_line(f"block {name_hex.lower()} · depth {block.depth}")
    output.print_table(
        ["node", "L1", "L2", ">prefill count", ">decode count"],
        [
            [
                copy.node_id,
                "yes" if copy.in_l1 else "-",
                "yes" if copy.in_l2 else "-",
                str(copy.prefill_count),
                str(copy.decode_count),
            ]
            for copy in block.copies
        ],
    )
    output.print_line(f"branches: {', '.join(block.branch_ids) or 'none'}")


def is_clean(answer: directory_pb2.AuditResponse) -> bool:
    """Whether what was compared agreed."""
    return not answer.mismatch_count and not answer.nonzero_after_end


def _answer(mismatch: directory_pb2.AuditMismatch, question: Literal["elsewhere", "node_elsewhere"]) -> str:
    """Yes, no, or that there is none."""
    if not mismatch.HasField(question):
        return "-"
    return "yes" if getattr(mismatch, question) else "no"


def print_audit(answer: directory_pb2.AuditResponse) -> None:
    """The verdict, then what did not agree."""
    verdict = "clean" if is_clean(answer) else "MISMATCH"
    if is_clean(answer) and answer.unreachable_node_ids:
        verdict = "INCOMPLETE"
    output.print_line(
        f"{verdict}: {answer.compared} pairs of node and block compared, {answer.mismatch_count} mismatches, "
        f"{answer.nonzero_after_end} counted for no live branch"
    )
    if answer.mismatches:
        output.print_table(
            ["node", "block", ">incremental", ">recounted", ">node evicts by", "in another L2", "as the node believes"],
            [
                [
                    each.node_id,
                    each.name.hex(),
                    str(each.incremental),
                    str(each.recounted),
                    str(each.node),
                    _answer(each, "elsewhere"),
                    _answer(each, "node_elsewhere"),
                ]
                for each in answer.mismatches
            ],
        )
    if answer.unreachable_node_ids:
        output.print_line(f"not compared, no answer: {', '.join(answer.unreachable_node_ids)}")
