"""A request through the gateway, when all goes well."""

from __future__ import annotations

import grpc
from gateway_harness import bench, failure
from scripted_nodes import BLOCK_TOKENS, MAX_CONTEXT, bytes_ids, expected_output, ids_bytes
from waiting import eventually

from evolving.core.blocks import chain_names, root_digest
from evolving.internal.v1 import directory_pb2
from evolving.v1 import common_pb2, gateway_pb2

PROMPT = list(range(1, 101))


async def test_a_request_is_prefilled_here_and_decoded_there() -> None:
    async with bench("p", "d") as it:
        await it.split(1, p="prefill", d="decode")
        stream = it.generate(PROMPT, sampling=gateway_pb2.Sampling(max_tokens=12))
        finished = await stream.all()
        assert stream.ids == expected_output(PROMPT, 12)
        assert bytes_ids(finished.output_token_ids) == stream.ids
        assert (finished.prefill_node_id, finished.decode_node_id) == ("p", "d")
        assert finished.reason == gateway_pb2.FINISH_REASON_LENGTH
        assert [started.prompt_tokens for started in stream.started] == [100]
        assert finished.usage == gateway_pb2.Usage(
            prompt_tokens=100, cached_tokens=48, computed_tokens=52, output_tokens=12
        )
        assert finished.cached == gateway_pb2.CachedTokens(own_l1=16, own_l2=32)
        assert finished.reusable_blocks == (100 + 12 - 1) // BLOCK_TOKENS
        assert (finished.timings.queue_s, finished.timings.fetch_s, finished.timings.prefill_s) == (0.25, 0.125, 0.5)
        assert finished.timings.fetch_hidden_s == 0.1
        assert finished.reuse == gateway_pb2.Reuse()
        assert 0 < finished.timings.ttft_s <= finished.timings.total_s
        assert finished.attempts == 0


async def test_both_legs_are_the_same_request_to_the_nodes() -> None:
    async with bench("p", "d") as it:
        await it.split(1, p="prefill", d="decode")
        await it.generate(PROMPT, priority=7, sampling=gateway_pb2.Sampling(max_tokens=3, temperature=0.5)).all()
        (prefill,) = it.nodes["p"].prefills
        (decode,) = it.nodes["d"].decodes
        assert prefill.transfer_id == decode.transfer_id
        assert prefill.leg_id != decode.leg_id
        assert prefill.token_ids == decode.token_ids == ids_bytes(PROMPT)
        assert prefill.root == decode.root == root_digest("tiny/f32", "", "default")
        assert prefill.priority == 7
        assert decode.source_address == "p:1"
        assert prefill.sampling == decode.sampling
        assert prefill.sampling.top_p == 1.0
        assert prefill.sampling.repetition_penalty == 1.0


async def test_one_node_serves_both_phases() -> None:
    async with bench("n") as it:
        stream = it.generate(PROMPT, sampling=gateway_pb2.Sampling(max_tokens=5))
        finished = await stream.all()
        assert (finished.prefill_node_id, finished.decode_node_id) == ("n", "n")
        assert stream.ids == expected_output(PROMPT, 5)


async def test_a_single_token_needs_no_decode_leg_to_end() -> None:
    async with bench("n") as it:
        stream = it.generate(PROMPT, sampling=gateway_pb2.Sampling(max_tokens=1))
        finished = await stream.all()
        assert stream.ids == expected_output(PROMPT, 1)
        assert finished.reason == gateway_pb2.FINISH_REASON_LENGTH
        await eventually(lambda: not it.nodes["n"].running)


async def test_max_tokens_defaults_to_512_and_ends_with_the_context() -> None:
    async with bench("n") as it:
        stream = it.generate(PROMPT)
        assert len((await stream.all()).output_token_ids) == 4 * 512
        await it.generate(PROMPT, sampling=gateway_pb2.Sampling(max_tokens=10**9)).until(
            lambda: len(it.nodes["n"].prefills) == 2
        )
        assert it.nodes["n"].prefills[1].sampling.max_tokens == MAX_CONTEXT - len(PROMPT)


async def test_stop_tokens_end_the_output_after_them() -> None:
    expected = expected_output(PROMPT, 8)
    async with bench("n") as it:
        stream = it.generate(PROMPT, sampling=gateway_pb2.Sampling(stop_token_ids=[expected[5]]))
        finished = await stream.all()
        assert stream.ids == expected[:6]
        assert finished.reason == gateway_pb2.FINISH_REASON_STOP


async def test_repeated_positions_reach_the_client_once() -> None:
    async with bench("n") as it:
        it.nodes["n"].script.repeat_ids = True
        stream = it.generate(PROMPT, sampling=gateway_pb2.Sampling(max_tokens=9))
        await stream.all()
        assert stream.ids == expected_output(PROMPT, 9)


async def test_the_directory_hears_the_whole_context_once_then_the_new_tail() -> None:
    branch = common_pb2.BranchMetadata(branch_id="b", parent_branch_id="a")
    longer = [*PROMPT, *range(200, 240)]
    names = chain_names(root_digest("tiny/f32", "", "default"), ids_bytes(longer), BLOCK_TOKENS)
    async with bench("n") as it:
        for number, prompt in enumerate((PROMPT, longer)):
            stream = it.generate(
                prompt, request_id=f"r{number}", branch=branch, sampling=gateway_pb2.Sampling(max_tokens=2)
            )
            await stream.all()
            assert stream.started[0].version == 3
        first, second = it.directory.begins
        assert (first.base_blocks, first.new_names) == (0, names[: 6 * 16])
        assert (second.base_blocks, second.base_name, second.new_names) == (6, names[5 * 16 : 6 * 16], names[6 * 16 :])
        assert first.branch == branch
        await eventually(lambda: len(it.directory.finished) == 2)
        assert {done.request_id for done in it.directory.finished} == {"r0", "r1"}
        assert {prefill.version for prefill in it.nodes["n"].prefills} == {3}


async def test_a_directory_that_lost_the_base_gets_all_of_it() -> None:
    branch = common_pb2.BranchMetadata(branch_id="b")
    async with bench("n") as it:
        await it.generate(PROMPT, branch=branch, sampling=gateway_pb2.Sampling(max_tokens=2)).all()
        it.directory.need_full = True
        await it.generate(PROMPT, branch=branch, sampling=gateway_pb2.Sampling(max_tokens=2)).all()
        assert [begin.base_blocks for begin in it.directory.begins] == [0, 6, 0]
        assert len(it.directory.begins[2].new_names) == 6 * 16


async def test_a_request_without_a_branch_only_matches() -> None:
    async with bench("n") as it:
        stream = it.generate(PROMPT, sampling=gateway_pb2.Sampling(max_tokens=2))
        await stream.all()
        assert not it.directory.begins[0].HasField("branch")
        assert stream.started[0].version == 0
        assert it.directory.finished == []


async def test_where_the_blocks_are_decides_and_hints_say_who_holds_them() -> None:
    async with bench("a", "b") as it:
        it.directory.match = directory_pb2.Match(
            pool_blocks=6,
            nodes=[directory_pb2.NodeMatch(node_id="a", l1_blocks=6, l2_blocks=6, any_blocks=6)],
            holders=[directory_pb2.HolderRun(first_block=0, blocks=6, node_ids=["a"])],
        )
        stream = it.generate(PROMPT, sampling=gateway_pb2.Sampling(max_tokens=2))
        await stream.all()
        assert stream.started[0].prefill_node_id == "a"
        assert stream.started[0].predicted_cached_tokens == 96
        await it.wait("a", 9.0)
        stream = it.generate(PROMPT, sampling=gateway_pb2.Sampling(max_tokens=2))
        await stream.until(lambda: bool(stream.started))
        (prefill,) = it.nodes["b"].prefills
        (hint,) = prefill.holders
        assert (hint.node_id, hint.pool_address, hint.incarnation) == ("a", "a:2", "a-1")
        assert (hint.first_block, hint.blocks) == (0, 6)
        assert prefill.expected_cached_tokens == 96


def held_by(node_id: str, blocks: int) -> directory_pb2.Match:
    """The match of a context whose first blocks one node holds in both tiers."""
    return directory_pb2.Match(
        pool_blocks=blocks,
        nodes=[directory_pb2.NodeMatch(node_id=node_id, l1_blocks=blocks, l2_blocks=blocks, any_blocks=blocks)],
        holders=[directory_pb2.HolderRun(first_block=0, blocks=blocks, node_ids=[node_id])],
    )


async def test_finished_tells_what_the_pool_had_and_what_was_to_be_reused() -> None:
    whole = PROMPT[: 6 * BLOCK_TOKENS]
    one_token = gateway_pb2.Sampling(max_tokens=1)
    async with bench("a", "b", fetch_bytes_per_s=1e6) as it:  # slower than computing
        it.directory.match, it.directory.loss = held_by("a", 6), common_pb2.LOSS_CAUSE_SWITCH
        at_holder = await it.generate(whole, sampling=one_token).all()
        assert at_holder.prefill_node_id == "a"
        assert at_holder.reuse == gateway_pb2.Reuse(
            pool_tokens=95, planned_tokens=95, loss=common_pb2.LOSS_CAUSE_SWITCH
        )
        await it.wait("a", 9.0)
        it.directory.loss = common_pb2.LOSS_CAUSE_UNSPECIFIED
        elsewhere = await it.generate(whole, sampling=one_token).all()
        assert elsewhere.prefill_node_id == "b"
        assert elsewhere.reuse == gateway_pb2.Reuse(pool_tokens=95, planned_tokens=0)


async def test_models_branches_and_ends() -> None:
    async with bench("n", "m") as it:
        (model,) = (await it.stub.ListModels(gateway_pb2.ListModelsRequest())).models
        assert (model.model, model.nodes, model.block_tokens) == ("tiny", 2, BLOCK_TOKENS)
        branch = (await it.stub.GetBranch(gateway_pb2.GetBranchRequest(branch_id="b"))).branch
        assert (branch.branch_id, branch.version) == ("b", 2)
        missing = await failure(it.stub.GetBranch(gateway_pb2.GetBranchRequest(branch_id="none")))
        assert missing.code() is grpc.StatusCode.NOT_FOUND
        ended = await it.stub.EndBranches(gateway_pb2.EndBranchesRequest(branch_ids=["x", "y"], subtree=True))
        assert list(ended.ended_branch_ids) == ["x", "y"]
        assert it.directory.ended[0].subtree
        assert it.directory.ended[0].tenant == "default"
