"""evolvectl's commands about branches, blocks and counts, against a scripted directory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from evolvectl_harness import evolvectl, one_line
from scripted_cluster import ScriptedDirectory, running

from evolving.v1 import common_pb2, directory_pb2
from evolving_client.ctl.plain import plain


@pytest.fixture
def directory() -> ScriptedDirectory:
    return ScriptedDirectory()


@pytest.fixture
def directory_address(directory: ScriptedDirectory) -> Iterator[str]:
    with running(directory) as address:
        yield address


def branches(count: int) -> list[common_pb2.Branch]:
    """Live branches b0, b1, …"""
    return [
        common_pb2.Branch(
            branch_id=f"b{number}",
            tenant="default",
            version=number + 1,
            state=common_pb2.BRANCH_STATE_LIVE,
            prompt_blocks=10,
            output_blocks=2,
            counts=common_pb2.BlockCounts(held_blocks=12, shared_blocks=3, zero_blocks=4),
            idle_s=1.5,
        )
        for number in range(count)
    ]


def test_branch_ls_pages_and_says_when_there_are_more(directory: ScriptedDirectory, directory_address: str) -> None:
    directory.branches = branches(7)
    directory.page = 3
    everything = evolvectl("--directory", directory_address, "--json", "branch", "ls")
    assert [branch["branch_id"] for branch in everything.json["branches"]] == [f"b{number}" for number in range(7)]
    assert everything.json["truncated"] is False
    some = evolvectl("--directory", directory_address, "--json", "branch", "ls", "--limit", "4")
    assert len(some.json["branches"]) == 4
    assert some.json["truncated"] is True
    exactly = evolvectl("--directory", directory_address, "--json", "branch", "ls", "--limit", "7")
    assert exactly.json["truncated"] is False
    table = evolvectl("--directory", directory_address, "branch", "ls", "--limit", "1")
    assert ["b0", "default", "live", "1", "10", "2", "12", "3", "4", "0", "1.50s", "-"] in table.words
    assert "--limit" in table.out


def test_branch_ls_asks_for_one_tenant_and_ended_ones(directory: ScriptedDirectory, directory_address: str) -> None:
    evolvectl("--directory", directory_address, "branch", "ls", "--tenant", "t", "--ended")
    (request,) = directory.requests
    assert isinstance(request, directory_pb2.ListBranchesRequest)
    assert (request.tenant, request.include_ended) == ("t", True)


def test_branch_show_tells_where_blocks_are_counted(directory: ScriptedDirectory, directory_address: str) -> None:
    (branch,) = directory.branches = branches(1)
    branch.homes.add(phase=common_pb2.PHASE_PREFILL, node_id="node-a", first_block=0, blocks=10)
    branch.homes.add(phase=common_pb2.PHASE_DECODE, node_id="node-b", first_block=2, blocks=8)
    branch.child_branch_ids.extend(["c1", "c2"])
    outcome = evolvectl("--directory", directory_address, "branch", "show", "b0")
    assert ["prefill", "node-a", "0", "10"] in outcome.words
    assert ["decode", "node-b", "2", "8"] in outcome.words
    assert "c1, c2" in outcome.out
    assert evolvectl("--directory", directory_address, "branch", "show", "b0", "--json").json == plain(branch)


def test_an_unknown_branch_or_block_is_refused(directory_address: str) -> None:
    for command in (["branch", "show", "none"], ["block", "show", "00" * 16]):
        outcome = evolvectl("--directory", directory_address, *command)
        assert outcome.code == 1
        one_line(outcome)


def test_block_show_lists_copies(directory: ScriptedDirectory, directory_address: str) -> None:
    name = bytes(range(16))
    block = directory_pb2.GetBlockResponse(depth=3, branch_ids=["b0", "b1"])
    block.copies.add(node_id="node-a", in_l1=True, in_l2=True, prefill_count=2)
    block.copies.add(node_id="node-b", in_l2=True, decode_count=1)
    directory.blocks[name] = block
    outcome = evolvectl("--directory", directory_address, "block", "show", name.hex().upper())
    assert ["node-a", "yes", "yes", "2", "0"] in outcome.words
    assert ["node-b", "-", "yes", "0", "1"] in outcome.words
    assert "b0, b1" in outcome.out
    as_json = evolvectl("--directory", directory_address, "block", "show", name.hex(), "--json").json
    assert as_json == {"name": name.hex(), **plain(block)}


@pytest.mark.parametrize("name", ["", "zz" * 16, "00" * 15, "00" * 17, "00" * 16 + "\n"])
def test_a_name_that_is_no_blocks_is_wrong_usage(
    directory: ScriptedDirectory, directory_address: str, name: str
) -> None:
    assert evolvectl("--directory", directory_address, "block", "show", name).code == 2
    assert not directory.requests


def test_a_clean_audit_exits_0(directory: ScriptedDirectory, directory_address: str) -> None:
    directory.audit = directory_pb2.AuditResponse(compared=42)
    outcome = evolvectl("--directory", directory_address, "audit")
    assert outcome.code == 0
    assert outcome.out.startswith("clean: 42 ")
    assert not outcome.err
    assert evolvectl("--directory", directory_address, "audit", "--json").json["clean"] is True


@pytest.mark.parametrize(("mismatches", "nonzero"), [(1, 0), (0, 1)])
def test_an_audit_with_a_mismatch_exits_1(
    directory: ScriptedDirectory, directory_address: str, mismatches: int, nonzero: int
) -> None:
    directory.audit = directory_pb2.AuditResponse(compared=42, mismatch_count=mismatches, nonzero_after_end=nonzero)
    directory.audit.mismatches.add(node_id="node-a", name=bytes(16), incremental=1, recounted=2, node=3)
    directory.audit.mismatches.add(
        node_id="node-b", name=bytes(16), incremental=1, recounted=1, node=1, elsewhere=False, node_elsewhere=True
    )
    outcome = evolvectl("--directory", directory_address, "audit")
    assert outcome.code == 1
    assert ["node-a", "00" * 16, "1", "2", "3", "-", "-"] in outcome.words
    assert ["node-b", "00" * 16, "1", "1", "1", "no", "yes"] in outcome.words
    one_line(outcome)
    as_json = evolvectl("--directory", directory_address, "audit", "--json")
    assert as_json.code == 1
    assert as_json.json["clean"] is False
    assert as_json.json["mismatches"][0]["name"] == "00" * 16
    assert [each.get("node_elsewhere") for each in as_json.json["mismatches"]] == [None, True]


def test_an_audit_without_all_nodes_exits_3(directory: ScriptedDirectory, directory_address: str) -> None:
    directory.audit = directory_pb2.AuditResponse(compared=42, unreachable_node_ids=["node-c"])
    outcome = evolvectl("--directory", directory_address, "audit")
    assert outcome.code == 3
    assert "node-c" in one_line(outcome)
