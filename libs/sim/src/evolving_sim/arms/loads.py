"""What a planner beside ours sees of the nodes: prompts that wait and are computed, requests that decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from evolving.core.planner import Split, SplitShape, assign
from evolving.core.terms import Role
from evolving_sim.arms.arm import Switch
from evolving_sim.node_config import NodeConfig


class Prompt(Protocol):
    """A prompt on a node."""

    @property
    def context_tokens(self) -> int:
        """Its length, whatever of it is cached."""

    @property
    def awaits_room(self) -> bool:
        """On its decode node, without which it isn't computed."""


class LoadedNode(Protocol):
    """A node as `node_loads` reads it."""

    @property
    def queue(self) -> Sequence[Prompt]:
        """Those not taken yet."""

    @property
    def running(self) -> Sequence[Prompt]:
        """Those being computed."""

    @property
    def decoding(self) -> int:
        """Requests with a slot."""

    @property
    def context_tokens(self) -> int:
        """Summed over those, and those that wait for a slot."""


class Controlled(Protocol):
    """A cluster as a planner knows it."""

    @property
    def split(self) -> Split:
        """In force."""

    @property
    def roles(self) -> Mapping[str, Role]:
        """Of live nodes."""

    @property
    def configs(self) -> Mapping[str, NodeConfig]:
        """By node."""

    @property
    def nodes(self) -> Mapping[str, LoadedNode]:
        """By id."""

    def change(self, split: Split) -> None:
        """Put another split in force."""


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """One node at one moment."""

    node_id: str
    role: Role
    awaiting_tokens: int  # of prompts that wait for room on their decode nodes, cached or not
    prompts_tokens: tuple[int, ...]  # of each that waits or is computed
    decoding: int
    context_tokens: int  # of those and of requests that wait to decode
    l1_tokens: int  # of KV that its device memory holds


def node_loads(cluster: Controlled) -> list[NodeLoad]:
    """All live nodes', by id."""
    return [_load(node_id, role, cluster) for node_id, role in sorted(cluster.roles.items())]


def _load(node_id: str, role: Role, cluster: Controlled) -> NodeLoad:
    node = cluster.nodes[node_id]
    queued = [prompt.context_tokens for prompt in node.queue]
    return NodeLoad(
        node_id=node_id,
        role=role,
        awaiting_tokens=sum(prompt.context_tokens for prompt in node.queue if prompt.awaits_room),
        prompts_tokens=(*(prompt.context_tokens for prompt in node.running), *queued),
        decoding=node.decoding,
        context_tokens=node.context_tokens,
        l1_tokens=cluster.configs[node_id].l1_tokens,
    )


def move(cluster: Controlled, roles: Mapping[str, Role], author: str, reason: str, now_s: float) -> Switch:
    """Put other roles in force."""
    split = cluster.split
    moves = sum(cluster.roles[node_id] is not role for node_id, role in roles.items())
    cluster.change(Split(split.epoch + 1, dict(roles), reason, author, now_s))
    return Switch(now_s, str(shape_of(roles)), moves)


def shape_of(roles: Mapping[str, Role]) -> SplitShape:
    """How many of the nodes prefill and decode."""
    values = list(roles.values())
    return SplitShape(values.count(Role.PREFILL), values.count(Role.DECODE))


def reshaped(roles: Mapping[str, Role], shape: SplitShape) -> dict[str, Role]:
    """The nodes in another shape, as few moved as possible."""
    return assign(shape, roles, roles)
