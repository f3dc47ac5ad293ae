"""Who is there: what services and node agents registered in etcd.

Keys below `{prefix}/{partition}/`: nodes/{node_id} and services/{kind}/{instance} hold JSON under their owners' leases,
so an entry means that its owner was alive a lease ago; leaders/{role} holds the leader's address; split the roles.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from etcd3aio import EtcdError, prefix_range_end
from etcd3aio.kv import KVService
from grpc import aio

from evolving_client.ctl.failure import Failure, unreachable

ELECTED_KINDS = ("planner",)


@dataclass(frozen=True, slots=True)
class Node:
    """A registered node agent."""

    node_id: str
    address: str
    incarnation: str
    model: str


@dataclass(frozen=True, slots=True)
class Service:
    """A registered instance of a gateway, a directory or a planner."""

    kind: str
    instance: str
    address: str
    version: str
    started_at_s: float


@dataclass(frozen=True, slots=True)
class Registry:
    """One partition at one moment. leaders: address by role; roles: node id to role; epoch: of the split, 0: none."""

    nodes: tuple[Node, ...] = ()
    services: tuple[Service, ...] = ()
    leaders: Mapping[str, str] = field(default_factory=dict)
    epoch: int = 0
    roles: Mapping[str, str] = field(default_factory=dict)

    def addresses(self, kind: str) -> tuple[str, ...]:
        """Addresses of a kind of service: the leader first, then the one started last, which replaces the others."""
        newest_first = sorted(self.services, key=lambda service: -service.started_at_s)
        found = [service.address for service in newest_first if service.kind == kind]
        leader = self.leaders.get(kind)
        return tuple(sorted(found, key=lambda address: address != leader))

    def leads(self, service: Service) -> bool | None:
        """Whether an instance leads its kind; None where instances of the kind elect no leader."""
        return self.leaders.get(service.kind) == service.address if service.kind in ELECTED_KINDS else None


async def read_registry(endpoints: Iterable[str], prefix: str, partition: str, timeout_s: float) -> Registry:
    """The partition's registry, from the first etcd member that answers. Raises Failure when none does."""
    root = f"{prefix.rstrip('/')}/{partition}/"
    tried = tuple(endpoints)
    for endpoint in tried:
        try:
            found = await _read_all(endpoint, root, timeout_s / len(tried))
        except (EtcdError, TimeoutError, aio.AioRpcError):
            continue
        return parse_registry({key.removeprefix(root): value for key, value in found.items()})
    raise unreachable(f"etcd at {', '.join(tried)} did not answer; see that it runs, or give its address with --etcd")


async def _read_all(endpoint: str, root: str, timeout_s: float) -> dict[str, bytes]:
    async with aio.insecure_channel(endpoint, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        store = KVService(channel, max_attempts=1)
        answer = await store.get(root, prefix_range_end(root), timeout=timeout_s)
        return {kv.key.decode(): bytes(kv.value) for kv in answer.kvs}


def parse_registry(found: Mapping[str, bytes]) -> Registry:
    """The registry in a partition's keys (without the partition's prefix) and values. Raises Failure for bad JSON."""
    nodes: list[Node] = []
    services: list[Service] = []
    leaders: dict[str, str] = {}
    epoch, roles = 0, {}
    for key, value in sorted(found.items()):
        kind, _, name = key.partition("/")
        if kind == "leaders":
            leaders[name] = value.decode(errors="replace")
            continue
        if kind not in ("nodes", "services", "split"):
            continue
        record = _json(key, value)
        try:
            if kind == "nodes":
                nodes.append(Node(record["node_id"], record["address"], record["incarnation"], record["model"]))
            elif kind == "services":
                services.append(_service(record))
            else:
                epoch, roles = record["epoch"], record["roles"]
        except KeyError as error:
            raise _bad(key, f"it has no {error}") from error
    return Registry(tuple(nodes), tuple(services), leaders, epoch, roles)


def _service(record: Mapping[str, Any]) -> Service:
    return Service(record["kind"], record["instance"], record["address"], record["version"], record["started_at_s"])


def _json(key: str, value: bytes) -> dict[str, Any]:
    try:
        record = json.loads(value)
    except ValueError as error:
        raise _bad(key, str(error)) from error
    if not isinstance(record, dict):
        raise _bad(key, "it is no object")
    return record


def _bad(key: str, problem: str) -> Failure:
    return unreachable(f"etcd's {key} is no registration ({problem}): do services and evolvectl have the same version?")
