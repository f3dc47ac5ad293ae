"""An operator who changes roles all the time, through whichever planner leads."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio
from chaos.watching import until

from evolving.runtime.channel import open_channel
from evolving.v1 import common_pb2, planner_pb2, planner_pb2_grpc
from evolving.wire.status import parse_error

_EVERY_S = 0.8
_CALL_S = 5.0
# What may meet an operator while planners, nodes and etcd come and go; he looks again and proposes anew.
_EXPECTED = {"UNAVAILABLE", "DEADLINE_EXCEEDED", "NOT_LEADER", "EPOCH_CHANGED", "CONFLICT", "SPLIT_REFUSED"}
_OTHER = {common_pb2.ROLE_PREFILL: common_pb2.ROLE_DECODE, common_pb2.ROLE_DECODE: common_pb2.ROLE_PREFILL}


@dataclass(slots=True)
class RoleChanges:
    """What became of each try. `by` names the planner that wrote each epoch, by its address."""

    planners: Sequence[str]
    by: dict[int, str] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    _rng: random.Random = field(default_factory=lambda: random.Random(1))

    async def go_on(self, changes: int = 2) -> None:
        """Wait until so many more were made."""
        target = len(self.by) + changes
        await until(lambda: len(self.by) >= target, f"roles don't change any more: {self.refused}")

    async def leader(self) -> str:
        """The address of the planner that leads; waits while none does."""
        while True:
            for address in self.planners:
                try:
                    split = await self._read(address)
                except grpc.aio.AioRpcError as error:
                    self._note(error)
                else:
                    if split.leader_address:
                        return split.leader_address
            await asyncio.sleep(0.1)

    async def run(self) -> None:
        """Change roles for ever."""
        while True:
            leader = await self.leader()
            try:
                await self._change(leader)
            except grpc.aio.AioRpcError as error:
                self._note(error)
            await asyncio.sleep(_EVERY_S)

    async def _read(self, address: str) -> planner_pb2.GetSplitResponse:
        async with open_channel(address) as channel:
            stub = planner_pb2_grpc.PlannerServiceStub(channel)
            return await stub.GetSplit(planner_pb2.GetSplitRequest(), timeout=_CALL_S)

    async def _change(self, leader: str) -> None:
        """Exchange the roles of two nodes, or move one out of the larger phase."""
        seen = await self._read(leader)
        prefill, decode = ([node.node_id for node in seen.nodes if node.role == role] for role in _OTHER)
        if not prefill or not decode:
            return
        movers = {common_pb2.ROLE_PREFILL: self._rng.choice(prefill), common_pb2.ROLE_DECODE: self._rng.choice(decode)}
        if len(prefill) != len(decode) or self._rng.randrange(2):
            del movers[common_pb2.ROLE_PREFILL if len(prefill) < len(decode) else common_pb2.ROLE_DECODE]
        moved = {node_id: _OTHER[role] for role, node_id in movers.items()}
        request = planner_pb2.ProposeSplitRequest(
            changes=planner_pb2.RoleChanges(roles=moved), expected_epoch=seen.split.epoch, reason="to disturb"
        )
        async with open_channel(leader) as channel:
            answer = await planner_pb2_grpc.PlannerServiceStub(channel).ProposeSplit(request, timeout=_CALL_S)
        assert answer.split.epoch > seen.split.epoch
        assert answer.split.epoch not in self.by, "an epoch was given out twice"
        self.by[answer.split.epoch] = leader

    def _note(self, error: grpc.aio.AioRpcError) -> None:
        reason = parse_error(error).reason or error.code().name
        if reason not in _EXPECTED and error.code().name not in _EXPECTED:
            raise error
        self.refused[reason] += 1


@asynccontextmanager
async def roles_changing(planners: Sequence[str]) -> AsyncIterator[RoleChanges]:
    """Roles change while the block runs."""
    changes = RoleChanges(planners)
    running = asyncio.create_task(changes.run())
    try:
        yield changes
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
