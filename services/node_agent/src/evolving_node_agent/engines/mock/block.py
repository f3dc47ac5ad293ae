"""One block that is held, and which kind of leg uses it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from evolving_node_agent.engines.port import Tier


class User(enum.IntEnum):
    """Which kind of leg holds pages; each kind has a share of L1 that the other leaves alone."""

    PREFILL = 0
    DECODE = 1


@dataclass(slots=True, eq=False)
class Block:
    """A full block that lies in at least one tier."""

    name: bytes
    parent: Block | None
    pages: dict[Tier, int] = field(default_factory=dict)
    children: dict[Tier, int] = field(default_factory=lambda: {Tier.L1: 0, Tier.L2: 0})
    counted_children: int = 0  # children that are effectively counted
    count: int = 0  # as the directory says
    locks: list[int] = field(default_factory=lambda: [0, 0])  # legs that use the L1 copy, by User
    leaves_l1: bool = False  # the L1 copy goes once no leg uses it
    accessed: int = 0  # value of the access counter at the last use

    @property
    def effective(self) -> bool:
        """Whether this block or a descendant here is counted."""
        return self.count > 0 or self.counted_children > 0

    @property
    def locked(self) -> bool:
        """Whether a leg uses the L1 copy."""
        return any(self.locks)
