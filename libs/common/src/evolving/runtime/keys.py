"""What lies where in etcd, and the JSON records under those keys.

Layout, below `{prefix}/{partition}/`:

    nodes/{node_id}              NodeRegistration, under the node agent's lease
    split                        Split, written by the leading planner only, fenced by its leader key
    leaders/{role}               the leader's advertised address (bytes), under its lease
    decisions/{number}           one decision of the planner, its JSON, fenced like the split; numbered from 0
    model                        the fitted time models of nodes, the planner's JSON, fenced like the split
    terms/{role}                 how often an instance of the role began, an ASCII integer that only grows
    services/{kind}/{instance}   ServiceRegistration, under the service's lease; kind: gateway, directory, planner
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

Role = Literal["prefill", "decode", "mixed", "draining"]
ServiceKind = Literal["gateway", "directory", "planner"]

_Text = Annotated[str, Field(min_length=1)]
_Count = Annotated[int, Field(ge=0)]
_Positive = Annotated[int, Field(ge=1)]
_Coefficient = Annotated[float, Field(ge=0, allow_inf_nan=False)]


_adapters: dict[type[Any], TypeAdapter[Any]] = {}  # building one takes milliseconds


class BadRecord(Exception):
    """A value in etcd is not the record its key promises."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names of one partition. Ids must not contain '/'."""

    prefix: str = "/evolving"
    partition: str = "p0"

    @property
    def root(self) -> str:
        """`{prefix}/{partition}`, without a trailing slash."""
        return f"{self.prefix.rstrip('/')}/{self.partition}"

    @property
    def nodes(self) -> str:
        """Prefix of every node's registration."""
        return f"{self.root}/nodes/"

    def node(self, node_id: str) -> str:
        """One node's registration."""
        return self.nodes + _part(node_id)

    @property
    def split(self) -> str:
        """The split in force."""
        return f"{self.root}/split"

    @property
    def decisions(self) -> str:
        """Prefix of the planner's decisions."""
        return f"{self.root}/decisions/"

    def decision(self, number: int) -> str:
        """One decision. Keys are in the order of their numbers."""
        return f"{self.decisions}{number:010d}"

    @property
    def model(self) -> str:
        """The planner's fitted time models."""
        return f"{self.root}/model"

    def term(self, role: str) -> str:
        """The counter a role takes its term from, such as "directory"."""
        return f"{self.root}/terms/{_part(role)}"

    def leader(self, role: str) -> str:
        """The election key of a role, such as "planner" or "directory"."""
        return f"{self.root}/leaders/{_part(role)}"

    def services(self, kind: ServiceKind) -> str:
        """Prefix of every instance of a kind of service."""
        return f"{self.root}/services/{kind}/"

    def service(self, kind: ServiceKind, instance: str) -> str:
        """One instance's registration."""
        return self.services(kind) + _part(instance)


@dataclass(frozen=True, slots=True)
class NodeRegistration:
    """A node that can serve: where its agent is, and facts of its engine fixed for one incarnation.

    Coefficients are the configured time model of the node (the paper, Eq. 1 and 2), seconds per unit:
    T_P = c0 + c1*t_uc + c2*A + c3*t_rst + c4*t_c and T_D(B) = d0 + d1*phi(B) + d2*B + d3*context.
    """

    node_id: _Text
    incarnation: _Text  # new at every start of the engine
    address: _Text  # host:port of the agent's gRPC
    model: _Text
    kv_format: str  # equal strings may exchange KV
    block_tokens: _Positive
    vocab_size: _Positive
    max_prompt_tokens: _Positive
    max_context_tokens: _Positive
    l1_tokens: _Count
    reserve_tokens: _Count  # of l1_tokens, what decodes leave to prefill
    l2_tokens: _Count
    decode_slots: _Positive
    chunk_tokens: _Positive
    kv_bytes_per_token: _Positive  # all layers
    transfer_address: str  # host:port decode legs pull from
    pool_address: str  # host:port peers read this node's L2 through
    prefill_coefficients: tuple[_Coefficient, _Coefficient, _Coefficient, _Coefficient, _Coefficient]  # c0..c4
    decode_coefficients: tuple[_Coefficient, _Coefficient, _Coefficient, _Coefficient]  # d0..d3
    experts: _Count = 0  # E, routed experts of a layer; 0: a dense model
    experts_per_token: _Count = 0  # k


@dataclass(frozen=True, slots=True)
class Split:
    """The role of each node. The effective split is this one restricted to live nodes."""

    epoch: _Count  # only grows
    roles: dict[str, Role]  # by node_id; a live node not listed is "mixed"
    reason: str
    author: str  # who decided: "planner", "operator:<name>", "bootstrap"
    written_at_s: float  # unix seconds


@dataclass(frozen=True, slots=True)
class ServiceRegistration:
    """A running instance of a service."""

    kind: ServiceKind
    instance: _Text  # unique among instances of the kind
    address: _Text  # host:port of its gRPC, as others reach it
    version: str
    started_at_s: float  # unix seconds


Record = TypeVar("Record", NodeRegistration, Split, ServiceRegistration)


def encode(record: NodeRegistration | Split | ServiceRegistration) -> bytes:
    """The record as JSON, UTF-8."""
    return _adapter(type(record)).dump_json(record)


def decode(kind: type[Record], value: bytes) -> Record:
    """The record in `value`. Fields it does not know are ignored, so that versions can run side by side.

    Raises BadRecord with the field at fault.
    """
    try:
        record: Record = _adapter(kind).validate_json(value, strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "value"
        raise BadRecord(f"not a {kind.__name__}: {where}: {first['msg']}") from error
    return record


def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def _part(name: str) -> str:
    assert re.fullmatch(r"[^/]+", name), f"not a key part: {name!r}"
    return name
