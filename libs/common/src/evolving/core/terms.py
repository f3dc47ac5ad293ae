"""The words every part of the core shares: tiers, phases, roles and the size of a block name."""

from __future__ import annotations

import enum

NAME_BYTES = 16
"""A block's name: the first 16 bytes of its chained SHA-256 digest."""

ANCHOR_BLOCKS = 16
"""Blocks whose depth is a multiple of this are indexed by name; a run on the wire starts at such a depth."""


class Tier(enum.IntEnum):
    """Where a copy lies. The values are the wire's."""

    L1 = 1  # device memory
    L2 = 2  # host memory, the shared pool


class Phase(enum.IntEnum):
    """One of the two parts of serving a request. The values are the wire's."""

    PREFILL = 1
    DECODE = 2


class Role(enum.IntEnum):
    """The phase a node is assigned; it decides what gateways send to a node, never what it can do."""

    PREFILL = 1
    DECODE = 2
    MIXED = 3  # warm-up, or a live node no split lists
    DRAINING = 4  # gets no new work
