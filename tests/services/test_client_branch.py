"""A branch of evolving_client: its id, version, parent and the context it remembers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
from scripted_gateway import Play, ScriptedGateway, output_ids, pack, refusal, serve, text_of

from evolving.v1 import common_pb2
from evolving_client import (
    Branch,
    BranchEnded,
    Client,
    InvalidRequest,
    RetryPolicy,
    StaleVersion,
    Tokens,
    Unavailable,
    UnknownBranch,
)

USER = {"role": "user", "content": "hi"}
TOOL = {"role": "tool", "content": "exit 0"}


@pytest.fixture
async def gateway() -> ScriptedGateway:
    return ScriptedGateway()


@pytest.fixture
async def client(gateway: ScriptedGateway) -> AsyncIterator[Client]:
    server, address = await serve(gateway)
    async with Client(address, retry=RetryPolicy(max_failures=1)) as client:
        yield client
    await server.stop(None)


def assistant(tokens: int = 8) -> dict[str, object]:
    """The scripted model's answer as a message."""
    ids = output_ids(tokens)
    return {"role": "assistant", "content": text_of(ids), "token_ids": tuple(ids)}


async def test_a_new_branch_has_an_id_of_its_own_and_version_one(client: Client, gateway: ScriptedGateway) -> None:
    one, other = client.branch(), client.branch()
    assert one.id
    assert one.id != other.id
    await one.complete(messages=[USER])
    assert gateway.requests[0].branch == common_pb2.BranchMetadata(branch_id=one.id, version=1)
    assert one.version == 1


async def test_messages_are_appended_after_the_models_answer(client: Client, gateway: ScriptedGateway) -> None:
    branch = client.branch()
    await branch.complete(messages=[USER])
    assert list(branch.messages) == [USER, assistant()]
    await branch.complete(append=[TOOL])
    sent = [(m.role, m.content, m.token_ids) for m in gateway.requests[1].chat.messages]
    answer = ("assistant", text_of(output_ids(8)), pack(output_ids(8)))
    assert sent == [(*USER.values(), b""), answer, (*TOOL.values(), b"")]
    assert list(branch.messages) == [USER, assistant(), TOOL, assistant()]
    assert branch.tokens == ()


async def test_token_ids_are_sent_again_verbatim_with_the_tail(client: Client, gateway: ScriptedGateway) -> None:
    branch = client.branch()
    await branch.complete(token_ids=[1, 2, 3], max_tokens=2)
    assert branch.tokens == (1, 2, 3, *output_ids(2))
    branch.extend_tokens([4])
    await branch.complete(append=[5, 6], max_tokens=2)
    assert gateway.requests[1].token_ids == pack([1, 2, 3, *output_ids(2), 4, 5, 6])
    assert branch.messages == ()


async def test_text_is_appended_to_text(client: Client, gateway: ScriptedGateway) -> None:
    branch = client.branch()
    await branch.complete(text="a", max_tokens=1)
    branch.extend("b")
    await branch.complete(append="c", max_tokens=1)
    assert gateway.requests[1].text == "a" + text_of(output_ids(1)) + "bc"


async def test_a_context_can_be_built_before_the_first_request(client: Client, gateway: ScriptedGateway) -> None:
    branch = client.branch()
    branch.extend_tokens([1, 2])
    branch.extend_tokens([3])
    await branch.complete()
    assert gateway.requests[0].token_ids == pack([1, 2, 3])


async def test_forms_do_not_mix(client: Client) -> None:
    branch = client.branch()
    with pytest.raises(InvalidRequest, match="no context"):
        branch.generate()
    branch.extend([USER])
    with pytest.raises(InvalidRequest, match="token ids"):
        branch.generate(append=[1, 2])
    with pytest.raises(InvalidRequest, match="text"):
        branch.extend("more")
    with pytest.raises(InvalidRequest, match="token ids"):
        branch.extend_tokens([1])
    with pytest.raises(InvalidRequest, match="not both"):
        branch.generate(messages=[USER], append=[USER])
    with pytest.raises(InvalidRequest, match="brackets"):
        branch.generate(append=USER)  # type: ignore[arg-type]


async def test_only_a_finished_request_changes_the_context(client: Client, gateway: ScriptedGateway) -> None:
    branch = client.branch()
    await branch.complete(messages=[USER])
    before = branch.messages
    gateway.plays.append(Play(fail_at=3))
    with pytest.raises(Unavailable):
        await branch.complete(append=[TOOL])
    async for event in branch.generate(append=[TOOL]):
        if isinstance(event, Tokens):
            break
    await branch.complete(append=[TOOL], remember=False)
    assert branch.messages == before
    await branch.complete(append=[TOOL])
    assert branch.messages == (*before, TOOL, assistant())


async def test_compaction_raises_the_version_at_the_next_request(client: Client, gateway: ScriptedGateway) -> None:
    branch = client.branch()
    await branch.complete(messages=[USER])
    branch.compact([TOOL])
    assert branch.version == 1
    await branch.complete(append=[USER])
    await branch.complete(append=[USER])
    assert [request.branch.version for request in gateway.requests] == [1, 2, 2]
    assert [message.role for message in gateway.requests[1].chat.messages] == ["tool", "user"]
    assert branch.version == 2


async def test_two_compactions_before_a_request_are_one(client: Client, gateway: ScriptedGateway) -> None:
    branch = client.branch()
    branch.compact([TOOL])  # nothing to drop yet: not a new version
    await branch.complete()
    branch.compact([USER])
    branch.compact([TOOL])
    await branch.complete()
    assert [request.branch.version for request in gateway.requests] == [1, 2]


async def test_a_compaction_outlives_a_request_that_never_started(client: Client, gateway: ScriptedGateway) -> None:
    branch = client.branch()
    await branch.complete(text="long")
    branch.compact()
    gateway.plays.append(Play(fail_at=0))
    with pytest.raises(Unavailable):
        await branch.complete(text="short")
    await branch.complete(text="short")
    assert [request.branch.version for request in gateway.requests] == [1, 2, 2]


async def test_a_branch_taken_up_by_its_id_learns_its_version(client: Client, gateway: ScriptedGateway) -> None:
    branch = client.branch("known")
    assert branch.version == 0
    await branch.complete(text="x")
    assert gateway.requests[0].branch.version == 0, "the current one, whatever it is"
    assert branch.version == 1
    gateway.branches["known"] = common_pb2.Branch(branch_id="known", version=5)
    other = client.branch("known")
    other.compact("y")
    await other.complete()
    assert gateway.requests[1].branch.version == 6
    new = client.branch("new")
    new.compact("z")
    await new.complete()
    assert gateway.requests[2].branch.version == 0, "nothing to rewrite"


async def test_a_stale_version_is_told_and_kept(client: Client, gateway: ScriptedGateway) -> None:
    branch = client.branch()
    await branch.complete(text="x")
    error = refusal(grpc.StatusCode.FAILED_PRECONDITION, "STALE_VERSION", current_version="4")
    gateway.plays.append(Play(fail_at=0, error=error))
    with pytest.raises(StaleVersion) as caught:
        await branch.complete(text="x")
    assert (caught.value.current_version, branch.version) == (4, 1)


async def test_a_fork_goes_on_from_the_parents_context(client: Client, gateway: ScriptedGateway) -> None:
    parent = client.branch()
    await parent.complete(token_ids=[1], max_tokens=1)
    parent.compact()
    await parent.complete(max_tokens=1)
    fork = parent.fork()
    await fork.complete(append=[2], max_tokens=1)
    request = gateway.requests[2]
    assert request.branch == common_pb2.BranchMetadata(branch_id=fork.id, version=1, parent_branch_id=parent.id)
    assert request.token_ids == pack([*parent.tokens, 2])
    assert fork.id != parent.id
    assert len(fork.tokens) == len(parent.tokens) + 2


async def test_a_subagent_starts_with_nothing(client: Client, gateway: ScriptedGateway) -> None:
    parent = client.branch()
    await parent.complete(messages=[USER])
    sub = parent.subagent("helper")
    assert sub.messages == ()
    await sub.complete(messages=[TOOL])
    metadata = gateway.requests[1].branch
    assert (metadata.branch_id, metadata.parent_branch_id, metadata.version) == ("helper", parent.id, 1)


async def test_an_ended_branch_can_not_be_used(client: Client, gateway: ScriptedGateway) -> None:
    branch = client.branch()
    await branch.complete(text="x")
    await branch.end()
    await branch.end()
    assert branch.ended
    with pytest.raises(BranchEnded):
        branch.generate(text="y")
    assert {tuple(request.branch_ids) for request in gateway.ended} == {(branch.id,)}


async def use_and_fail(branch: Branch) -> None:
    """A block of a caller that breaks after one request."""
    async with branch:
        await branch.complete(text="x")
        raise RuntimeError("of the caller")


async def test_a_branch_ends_with_its_block(client: Client, gateway: ScriptedGateway) -> None:
    async with client.branch() as branch:
        await branch.complete(text="x")
    other = client.branch()
    with pytest.raises(RuntimeError, match="of the caller"):
        await use_and_fail(other)
    assert [list(request.branch_ids) for request in gateway.ended] == [[branch.id], [other.id]]


async def test_a_failed_end_does_not_hide_the_callers_error(client: Client, gateway: ScriptedGateway) -> None:
    gateway.unary_errors.append(refusal(grpc.StatusCode.UNAVAILABLE, "NOT_READY"))
    branch = client.branch()
    with pytest.raises(RuntimeError, match="of the caller") as caught:
        await use_and_fail(branch)
    assert branch.id in caught.value.__notes__[0]
    gateway.unary_errors.append(refusal(grpc.StatusCode.UNAVAILABLE, "NOT_READY"))
    other = client.branch()
    await other.complete(text="x")
    with pytest.raises(Unavailable):
        await other.__aexit__(None, None, None)


async def test_an_unused_branch_needs_no_end(client: Client, gateway: ScriptedGateway) -> None:
    async with client.branch():
        pass
    assert not gateway.ended


async def test_end_after_ends_with_the_request(client: Client, gateway: ScriptedGateway) -> None:
    async with client.branch() as branch:
        await branch.complete(text="x", end_after=True)
        assert gateway.requests[0].branch.end_after
        assert branch.ended
    assert not gateway.ended, "the request's end was the branch's"


async def test_a_subtree_is_ended_at_once(client: Client, gateway: ScriptedGateway) -> None:
    assert await client.end(["a", "b"], subtree=True) == ("a", "b")
    await client.branch("c").end(subtree=True)
    assert [(list(request.branch_ids), request.subtree) for request in gateway.ended] == [
        (["a", "b"], True),
        (["c"], True),
    ]


async def test_info_is_what_the_cluster_knows(client: Client, gateway: ScriptedGateway) -> None:
    branch = client.branch()
    with pytest.raises(UnknownBranch):
        await branch.info()
    gateway.branches[branch.id] = common_pb2.Branch(branch_id=branch.id, prompt_blocks=3)
    assert (await branch.info()).prompt_blocks == 3
