"""Every write of the split since etcd began, with who led when it was made."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import grpc.aio
from chaos.faulty_cluster import FaultyCluster
from etcd3aio._protobuf import WatchCreateRequest, WatchRequest, WatchStub
from etcd3aio.kv import KVService

from evolving.runtime.keys import Keys, Split, decode

_READ_S = 30.0


@dataclass(frozen=True, slots=True)
class SplitWrite:
    """leader: the address of the planner that led at that moment, "": none. office: the revision of etcd in which it
    took the leader's key; 0: none led."""

    split: Split
    leader: str
    office: int


async def split_log(endpoints: Sequence[str], keys: Keys) -> list[SplitWrite]:
    """In the order of the writes: etcd's own history of the split and of the leader's key, from revision 1 on."""
    end = f"{keys.split}-read"  # the split's key, the leaders' and this one lie in one range: one watch, in order
    writes: list[SplitWrite] = []
    leader, office = "", 0
    async with grpc.aio.insecure_channel(endpoints[0], options=[("grpc.max_receive_message_length", -1)]) as channel:
        marker = int((await KVService(channel).put(end, b"", timeout=_READ_S)).header.revision)
        stream = WatchStub(channel).Watch(timeout=_READ_S)
        create = WatchCreateRequest(
            key=keys.leader("planner").encode(), range_end=f"{end}\0".encode(), start_revision=1
        )
        await stream.write(WatchRequest(create_request=create))
        while True:
            response = await stream.read()
            assert not response.canceled, response.cancel_reason
            for event in response.events:
                key, deleted = event.kv.key.decode(), event.type == event.DELETE
                if key == keys.leader("planner"):
                    leader, office = ("", 0) if deleted else (event.kv.value.decode(), event.kv.create_revision)
                elif key == keys.split:
                    assert not deleted, "the split is never deleted"
                    writes.append(SplitWrite(decode(Split, event.kv.value), leader, office))
                elif key == end and event.kv.mod_revision == marker:
                    return writes


def faults_of(writes: Sequence[SplitWrite], claims: Mapping[int, Collection[str]]) -> list[str]:
    """What is wrong with a history of the split. `claims` says by epoch which planners, by address, say they wrote it:
    not all do, as one that dies or loses etcd right after the write says nothing."""
    wrong = []
    for before, after in itertools.pairwise(writes):
        if after.split.epoch <= before.split.epoch:
            wrong.append(f"epoch {after.split.epoch} came after {before.split.epoch}")
        if after.office < before.office:
            wrong.append(f"epoch {after.split.epoch} was written by a former leader")
    wrong += [f"epoch {write.split.epoch} was written while nobody led" for write in writes if not write.office]
    led = {write.split.epoch: {write.leader} for write in writes}
    for epoch, writers in claims.items():
        if set(writers) != led.get(epoch):
            wrong.append(f"epoch {epoch} is claimed by {sorted(writers)}, and {led.get(epoch)} led")
    return wrong


def claims_of(cluster: FaultyCluster) -> dict[int, set[str]]:
    """Which planners say in their logs that they wrote an epoch."""
    claims = defaultdict[int, set[str]](set)
    for address, name in cluster.planners.items():
        for line in cluster.log_path(name).read_text(errors="replace").splitlines():
            if '"split_written"' in line:
                claims[json.loads(line)["epoch"]].add(address)
    return dict(claims)
