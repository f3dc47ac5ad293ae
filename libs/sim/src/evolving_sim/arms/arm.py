"""What an arm is: who routes, who changes the split, what nodes evict, when they fetch, what a switch costs.

Policies see what a router could see when it chooses: the prompt and the nodes as they are. What the request will
generate, and what comes after it, are in neither.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from evolving.core.candidates import NodeView
from evolving.core.config import EvictionPolicy
from evolving.core.decode_routing import DecodeNode
from evolving.core.routing import Context, RoutingConfig
from evolving.core.work import PrefillWork

if TYPE_CHECKING:
    from evolving_sim.events import EventHeap
    from evolving_sim.sim_cluster import SimCluster


@dataclass(frozen=True, slots=True)
class Asked:
    """What a router sees of a request: its prompt and whose it is, not what it will generate."""

    context: Context  # the prompt, and what the directory says of it; a router without one has to leave that alone
    agent_id: str  # of the main agent, also where a sub-agent asks
    branch_id: str
    parent_branch_id: str  # "": a root
    names: Sequence[bytes]  # of the prompt's full blocks


@dataclass(frozen=True, slots=True)
class PrefillNode:
    """What a router knows of a node that prefills now."""

    view: NodeView
    prefilling: Sequence[PrefillWork]  # of prompts sent there whose first token isn't there yet, as they were sent
    open_requests: int  # requests sent there that aren't finished, wherever they are now


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """Where a prompt goes, and how many blocks, after the leading ones it has, that node is to get from peers."""

    node_id: str
    fetched_blocks: int = 0


class PrefillPolicy(Protocol):
    """Chooses the node that prefills."""

    def choose(self, asked: Asked, nodes: Sequence[PrefillNode], now_s: float, /) -> PrefillChoice:
        """Where `asked` goes; `nodes`, ordered by id, serve the phase now and are one at least."""


class DecodePolicy(Protocol):
    """Chooses the node that decodes."""

    def choose(self, asked: Asked, nodes: Sequence[DecodeNode], now_s: float, /) -> str:
        """Id of the node for `asked`; `nodes`, ordered by id, serve the phase now and are one at least."""


@dataclass(frozen=True, slots=True)
class Switch:
    """A change of the split."""

    at_s: float
    shape: str  # after it
    moves: int
    gain: float = math.nan  # expected, where the planner reckons with one


class Controller(Protocol):
    """Changes the split while the cluster serves."""

    @property
    def switches(self) -> list[Switch]:
        """So far."""

    def begin(self, events: EventHeap, cluster: SimCluster) -> None:
        """Watch the cluster from now on. Called once."""


class FetchMode(enum.StrEnum):
    """What becomes of KV that another node has in its host memory."""

    NONE = "none"  # nothing: there is no pool, a node uses what it has itself
    AT_START = "at start"  # it is fetched when the prompt's turn has come: that time adds to prefill (§2.3)
    ASYNC = "async"  # it is fetched while the prompt waits (§4.1)


@dataclass(frozen=True, slots=True)
class Switching:
    """What it costs a node to change its phase."""

    out_of_service_s: float = 0.0  # so long it is sent nothing; what it runs finishes meanwhile
    loses_kv: bool = False  # in both tiers, when it switches

    def __post_init__(self) -> None:
        if not 0 <= self.out_of_service_s < math.inf:
            raise ValueError(f"out_of_service_s must be finite and at least 0, got {self.out_of_service_s}")


IN_PLACE = Switching()
"""At once, and its KV stays (§4.1)."""

IN_PLACE_LOSING = Switching(loses_kv=True)
"""At once, but what it holds can't be used any more (§2.1, Arrow)."""


def restart(seconds: float) -> Switching:
    """The engine is started anew, empty (§2.1, Dynamo)."""
    return Switching(seconds, loses_kv=True)


@dataclass(frozen=True, slots=True)
class PolicySetup:
    """What the policies of a run are made from."""

    routing: RoutingConfig
    seed: int  # of what they draw


@dataclass(frozen=True, slots=True)
class Policies:
    """Who decides in one run. What they know of it they may share."""

    prefill: PrefillPolicy
    decode: DecodePolicy
    controller: Controller | None = None  # None: the split stays


@dataclass(frozen=True, slots=True)
class Arm:
    """A system to simulate, but for the nodes' speed and sizes."""

    name: str
    policies: Callable[[PolicySetup], Policies]  # made anew for each run
    eviction: EvictionPolicy = EvictionPolicy.AGENT
    fetch: FetchMode = FetchMode.ASYNC
    switching: Switching = IN_PLACE
    # How often a node's host memory keeps the same KV: once, or once for each of its GPUs (§4.1), a mean. A node holds
    # in L2 so many times fewer tokens.
    host_copies: float = 1.0
    # Whether a prompt waits until its decode node has room for it before it is computed, or is computed first.
    reserves_first: bool = False
    # Tokens of KV a second that come from host memory into a node's device memory at most, whatever its c3 is.
    restored_tokens_per_s: float = math.inf

    def __post_init__(self) -> None:
        if self.host_copies < 1:
            raise ValueError(f"host_copies must be at least 1, got {self.host_copies}")
        if not self.restored_tokens_per_s > 0:
            raise ValueError(f"restored_tokens_per_s must be positive, got {self.restored_tokens_per_s}")
