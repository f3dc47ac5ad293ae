"""The paper's plain rule for a node that turns from decode to prefill (§4.1), over the wire: its counts go, and its
copies as it says that they go; and long work of the directory that other calls don't wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator
from contextlib import AsyncExitStack, asynccontextmanager

from directory_harness import KEYS, Directory, Node, blocks_of, context, directory, split_record
from etcd_process import Etcd
from planner_harness import join, open_store
from waiting import WAIT_S, eventually

from evolving.core.terms import Phase, Role, Tier
from evolving.internal.v1 import directory_pb2
from evolving.runtime.etcd import EtcdStore
from evolving.v1 import common_pb2
from evolving.v1 import directory_pb2 as public_pb2
from evolving_directory.slices import in_turns

PROMPT = context("a", 3)
WHOLE = context("out", 2, PROMPT)


class Turning:
    """A prefill and a decode node, and a branch that both hold, its output only on the decode node."""

    def __init__(self, store: EtcdStore, to: Directory, p: Node, d: Node) -> None:
        self.store, self.to, self.p, self.d = store, to, p, d

    @classmethod
    @asynccontextmanager
    async def open(cls, etcd: Etcd) -> AsyncIterator[Turning]:
        """With the paper's rule."""
        async with AsyncExitStack() as stack:
            store = await stack.enter_async_context(open_store(etcd))
            await join(store, "p", "d")
            await store.put(KEYS.split, split_record(1, p=Role.PREFILL, d=Role.DECODE))
            to = await stack.enter_async_context(directory(etcd, decode_to_prefill="reset"))
            p = await stack.enter_async_context(Node("p").connected(to))
            d = Node("d")
            await d.connect(to)
            stack.push_async_callback(d.disconnect)
            turning = cls(store, to, p, d)
            await to.begin("b", PROMPT)
            for node, phase in ((p, Phase.PREFILL), (d, Phase.DECODE)):
                await node.store(PROMPT)
                await node.landed("b", 3, phase)
            await d.store(WHOLE, skip=3)
            await d.output("b", 3, WHOLE[3 * 16 :])
            await p.counts_become(dict.fromkeys(blocks_of(PROMPT), 1))
            await d.counts_become(dict.fromkeys(blocks_of(WHOLE), 1))
            yield turning

    async def switch(self) -> None:
        """The decode node turns prefill."""
        await self.store.put(KEYS.split, split_record(2, p=Role.PREFILL, d=Role.PREFILL))

    async def cleared(self, times: int = 1) -> None:
        """The node was told to empty itself."""

        async def told() -> bool:
            return len(self.d.clears) == times

        await eventually(told)

    async def depth(self, node_id: str) -> int:
        """Leading blocks of the context that a node has, for all the directory knows."""
        match = (await self.to.begin("", WHOLE)).match
        return next((node.any_blocks for node in match.nodes if node.node_id == node_id), 0)

    async def clean(self) -> None:
        """All three counts agree."""
        audit = await self.to.audit()
        assert audit.mismatch_count == 0, audit.mismatches
        assert audit.nonzero_after_end == 0
        assert not audit.unreachable_node_ids


def cleared(tier: Tier) -> directory_pb2.KvChange:
    return directory_pb2.KvChange(kind=directory_pb2.KvChange.KIND_CLEARED, tier=common_pb2.Tier.ValueType(tier))


async def test_a_reset_takes_the_homes_at_once_and_the_copies_when_the_node_lets_them_go(etcd: Etcd) -> None:
    async with Turning.open(etcd) as at:
        await at.switch()
        await at.cleared()
        await at.d.counts_become({})
        assert not at.d.retiers
        await at.clean()
        homes = {(home.phase, home.node_id) for home in (await at.to.branch("b")).homes}
        assert homes == {(common_pb2.PHASE_PREFILL, "p")}
        assert await at.depth("d") == 5, "it has them until it says otherwise"

        await at.d.remove(WHOLE, keep=3)  # what the running request needs stays
        await at.d.landed("b", 3, Phase.DECODE)
        await at.d.counts_become(dict.fromkeys(blocks_of(PROMPT), 1))
        assert await at.depth("d") == 3
        await at.clean()
        await at.d.done("b")
        at.d.held.clear()
        await at.d.send_batch([cleared(tier) for tier in Tier])
        await at.d.counts_become({})
        assert await at.depth("d") == 0
        await at.p.counts_become(dict.fromkeys(blocks_of(PROMPT), 1))
        await at.clean()

        lost = await at.to.begin("b", WHOLE[3 * 16 :], request="r2", base=PROMPT)
        assert lost.loss == common_pb2.LOSS_CAUSE_SWITCH
        again = await at.to.begin("b", WHOLE[3 * 16 :], request="r2", base=PROMPT)
        assert (again.kind, again.loss) == (directory_pb2.BEGIN_KIND_REPLAY, common_pb2.LOSS_CAUSE_SWITCH)
        await at.to.finish("b", "r2")
        later = await at.to.begin("b", context("tool", 1, WHOLE)[-16:], request="r3", base=WHOLE)
        assert later.loss == common_pb2.LOSS_CAUSE_UNSPECIFIED


async def test_a_node_that_was_away_at_the_switch_is_told_when_it_is_back(etcd: Etcd) -> None:
    async with Turning.open(etcd) as at:
        await at.d.disconnect()

        async def away() -> bool:
            return [node.connected for node in (await at.to.stats()).nodes if node.node_id == "d"] == [False]

        await eventually(away)
        await at.switch()

        async def left() -> bool:
            return {home.node_id for home in (await at.to.branch("b")).homes} == {"p"}

        await eventually(left)
        await at.d.connect(at.to)
        await at.cleared()
        await at.d.counts_become({})
        await at.d.disconnect()
        await at.d.connect(at.to)
        await at.d.counts_become({})
        await at.d.taken()
        assert len(at.d.clears) == 1, "told once"


async def test_any_block_is_found_and_an_unknown_one_is_not(etcd: Etcd) -> None:
    async with directory(etcd) as to, Node("n").connected(to) as node:
        long = context("long", 40)
        await node.store(long)
        await node.taken()
        for depth in (0, 7, 16, 39):
            name = blocks_of(long)[depth]
            block = await to.public.GetBlock(public_pb2.GetBlockRequest(name=name), timeout=WAIT_S)
            assert (block.depth, [copy.node_id for copy in block.copies]) == (depth, ["n"])


async def test_long_work_lets_others_have_their_turn() -> None:
    order: list[str] = []

    def work() -> Generator[None, None, str]:
        for part in range(3):
            order.append(f"part {part}")
            yield
        return "done"

    async def other() -> None:
        for turn in range(3):
            order.append(f"other {turn}")
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    assert await in_turns(work()) == "done"
    await beside
    assert order == ["part 0", "other 0", "part 1", "other 1", "part 2", "other 2"]
