"""`evolvectl status`: every registered node and service, asked directly."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from evolving.internal.v1 import node_agent_pb2, node_agent_pb2_grpc
from evolving.v1 import common_pb2
from evolving_client.ctl import output
from evolving_client.ctl.cluster import Cluster
from evolving_client.ctl.plain import Plain, plain
from evolving_client.ctl.registry import Node, Registry, Service

_LONGEST_PROBE_S = 3.0


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node and what it said of itself; None: nothing in time."""

    node: Node
    status: node_agent_pb2.WatchStatusResponse | None

    @property
    def state(self) -> str:
        """ "ready", "starting" or "unreachable"."""
        if self.status is None:
            return "unreachable"
        return "ready" if self.status.ready else "starting"


@dataclass(frozen=True, slots=True)
class ServiceState:
    """A service instance and its health: "serving", "not serving" or "unreachable"."""

    service: Service
    health: str
    leads: bool | None  # None: its kind elects no leader


async def gather(cluster: Cluster) -> tuple[Registry, list[NodeState], list[ServiceState]]:
    """Ask all of them at once."""
    registry = await cluster.registry()
    timeout_s = min(cluster.options.timeout_s, _LONGEST_PROBE_S)
    nodes, services = await asyncio.gather(
        asyncio.gather(*(_node(cluster, node, timeout_s) for node in registry.nodes)),
        asyncio.gather(*(_service(cluster, registry, service, timeout_s) for service in registry.services)),
    )
    return registry, list(nodes), list(services)


async def _node(cluster: Cluster, node: Node, timeout_s: float) -> NodeState:
    stub = node_agent_pb2_grpc.NodeAgentServiceStub(cluster.channel(node.address))
    request = node_agent_pb2.WatchStatusRequest(partition_id=cluster.options.partition)
    call = stub.WatchStatus(request, timeout=timeout_s, metadata=cluster.metadata)
    try:
        message = await call.read()
    except aio.AioRpcError:
        return NodeState(node, None)
    finally:
        call.cancel()
    return NodeState(node, message if isinstance(message, node_agent_pb2.WatchStatusResponse) else None)


async def _service(cluster: Cluster, registry: Registry, service: Service, timeout_s: float) -> ServiceState:
    stub: Any = health_pb2_grpc.HealthStub(cluster.channel(service.address))
    leads = registry.leads(service)
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    except aio.AioRpcError:
        return ServiceState(service, "unreachable", leads)
    assert isinstance(answer, health_pb2.HealthCheckResponse)
    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    return ServiceState(service, "serving" if serving else "not serving", leads)


def as_json(registry: Registry, nodes: list[NodeState], services: list[ServiceState], partition: str) -> Plain:
    """The documented form. A node's fields from "role" on are null while it is unreachable."""
    return {
        "partition": partition,
        "epoch": registry.epoch,
        "split": dict(sorted(registry.roles.items())),
        "leaders": dict(sorted(registry.leaders.items())),
        "nodes": [_node_json(state) for state in nodes],
        "services": [
            {
                "kind": state.service.kind,
                "instance": state.service.instance,
                "address": state.service.address,
                "health": state.health.replace(" ", "_"),
                "leads": state.leads,
                "version": state.service.version,
                "started_at_s": state.service.started_at_s,
            }
            for state in services
        ],
    }


def _node_json(state: NodeState) -> Plain:
    told = plain(state.status or node_agent_pb2.WatchStatusResponse())
    for name in ("node_id", "incarnation", "ready"):
        told.pop(name)
    if state.status is None:
        told = dict.fromkeys(told)
    node = state.node
    return {
        "node_id": node.node_id,
        "address": node.address,
        "incarnation": node.incarnation,
        "model": node.model,
        "state": state.state,
        **told,
    }


def print_status(registry: Registry, nodes: list[NodeState], services: list[ServiceState], partition: str) -> None:
    """Two tables and a line above them."""
    roles = [_role(registry, state) for state in nodes]
    leader = registry.leaders.get("planner", "nobody")
    output.print_line(
        f"partition {partition} · split {output.shape_of(roles)} · epoch {registry.epoch} · planner: {leader} leads"
    )
    output.print_table(
        ["node", "state", "role", ">epoch", ">wait", ">queued", ">to fetch", ">prefilling", ">holding", ">decoding",
         ">slots free", ">KV L1 tokens", ">KV L2 tokens", ">L2 uncounted", ">engine pid", ">starts", "address"],
        [_node_row(state, role) for state, role in zip(nodes, roles, strict=True)],
    )  # fmt: skip
    output.print_table(
        ["service", "instance", "health", "leads", "version", "since", "address"],
        [
            [
                state.service.kind,
                state.service.instance,
                state.health,
                "leader" if state.leads else "",
                state.service.version,
                output.moment(state.service.started_at_s),
                state.service.address,
            ]
            for state in services
        ],
    )


def _role(registry: Registry, state: NodeState) -> str:
    if state.status is not None and state.status.role != common_pb2.ROLE_UNSPECIFIED:
        return str(plain(state.status)["role"])
    return registry.roles.get(state.node.node_id, "mixed")


def _node_row(state: NodeState, role: str) -> list[str]:
    status = state.status
    if status is None:
        return [state.node.node_id, state.state, role, *["-"] * 13, state.node.address]
    return [
        state.node.node_id,
        state.state,
        role,
        str(status.epoch),
        output.seconds(status.wait_s),
        str(status.queued_legs),
        str(status.fetch_backlog_tokens),
        str(status.prefilling_legs),
        str(status.holding_legs),
        str(status.decoding),
        str(status.decode_slots_free),
        output.share(status.l1_used_tokens, status.l1_total_tokens),
        output.share(status.l2_used_tokens, status.l2_total_tokens),
        output.percent(status.l2_zero_tokens, status.l2_used_tokens),
        str(status.engine_pid),
        str(status.engine_starts),
        state.node.address,
    ]
