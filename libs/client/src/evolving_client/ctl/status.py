"""`evolvectl status`: every registered node and service, asked directly."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from evolving.internal.v1 import node_agent_pb2, node_agent_pb2_grpc
from evolving.v1 import common_pb2, planner_pb2
from evolving_client.ctl import output, split
from evolving_client.ctl.cluster import Cluster
from evolving_client.ctl.failure import Failure
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


@dataclass(frozen=True, slots=True)
class Found:
    """A partition, as it is registered and as it answers. plan: None where no planner says."""

    registry: Registry
    nodes: list[NodeState]
    services: list[ServiceState]
    plan: planner_pb2.GetSplitResponse | None

    @property
    def hold(self) -> planner_pb2.Hold | None:
        """The operator's hold, if one is known."""
        return self.plan.hold if self.plan is not None and self.plan.HasField("hold") else None


async def gather(cluster: Cluster) -> Found:
    """Ask all of them at once."""
    registry = await cluster.registry()
    timeout_s = min(cluster.options.timeout_s, _LONGEST_PROBE_S)
    nodes, services, plan = await asyncio.gather(
        asyncio.gather(*(_node(cluster, node, timeout_s) for node in registry.nodes)),
        asyncio.gather(*(_service(cluster, registry, service, timeout_s) for service in registry.services)),
        _plan(cluster, timeout_s),
    )
    return Found(registry, list(nodes), list(services), plan)


async def _plan(cluster: Cluster, timeout_s: float) -> planner_pb2.GetSplitResponse | None:
    try:
        async with asyncio.timeout(timeout_s):
            return await split.read_split(cluster)
    except (Failure, TimeoutError):
        return None


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


def as_json(found: Found, partition: str) -> Plain:
    """The documented form. A node's fields from "role" on are null while it is unreachable."""
    registry, plan, hold = found.registry, found.plan, found.hold
    return {
        "partition": partition,
        "epoch": registry.epoch,
        "split": dict(sorted(registry.roles.items())),
        "leaders": dict(sorted(registry.leaders.items())),
        "mode": plan.mode if plan is not None else None,
        "hold": plain(hold) if hold is not None else None,
        "nodes": [_node_json(state) for state in found.nodes],
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
            for state in found.services
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


def print_status(found: Found, partition: str) -> None:
    """Two tables and lines above them."""
    registry, plan = found.registry, found.plan
    roles = [_role(registry, state) for state in found.nodes]
    leader = registry.leaders.get("planner", "nobody")
    output.print_line(
        f"partition {partition} · split {output.shape_of(roles)} · epoch {registry.epoch} · planner: {leader} leads"
    )
    if plan is not None:
        output.print_line(f"mode {plan.mode or 'unknown'} · {split.hold_line(found.hold)}")
    output.print_table(
        ["node", "state", "role", ">epoch", ">wait", ">queued", ">to fetch", ">prefilling", ">holding", ">decoding",
         ">slots free", ">KV L1 tokens", ">KV L2 tokens", ">L2 uncounted", ">engine pid", ">starts", "address"],
        [_node_row(state, role) for state, role in zip(found.nodes, roles, strict=True)],
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
            for state in found.services
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
