"""The entries of a directory's log: what it must be told to become again what it was.

A directory says an entry for each change of branches and homes, as soon as it happened, to the `log` it was given.
Copies are not in it, for nodes announce them anew; so no entry leans on copies, nor on configured time limits: a Begin
whose base only copies name is written out in full, and what a switch of roles claimed for a node is listed.

`evolving.core.directory_replay` makes a directory of entries. Times are seconds of the directory's clock; depths and
lengths count blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from evolving.core.directory_types import Begin, Landed, Output


class Began(NamedTuple):
    """A request seen for the first time. Its base, if it has one, is in its branch's or the parent's context."""

    now_s: float
    event: Begin


class Heard(NamedTuple):
    """News of a request that change nothing else: it began once more, or lost its node."""

    now_s: float
    tenant: str
    branch_id: str
    request_id: str


class KvLanded(NamedTuple):
    """A Landed that was not ignored, or came when no block of it was in the context any more."""

    now_s: float
    event: Landed


class OutputMade(NamedTuple):
    """An Output that was not ignored."""

    now_s: float
    event: Output


class RequestDone(NamedTuple):
    """A running request is over."""

    now_s: float
    tenant: str
    branch_id: str
    request_id: str


class BranchesEnded(NamedTuple):
    """Branches were ended, some of which were live."""

    now_s: float
    tenant: str
    branch_ids: tuple[str, ...]
    subtree: bool


class TimePassed(NamedTuple):
    """Time alone ended something, with these limits in force (DirectoryConfig)."""

    now_s: float
    request_ttl_s: float
    idle_ttl_s: float
    tombstone_s: float


class NodeCame(NamedTuple):
    """A node is up that was not, or starts anew."""

    now_s: float
    node_id: str
    incarnation: str


class NodeLost(NamedTuple):
    """A node is gone for good."""

    now_s: float
    node_id: str


class Turned(NamedTuple):
    """Of a switch of roles, what it did to one branch: the node became the PREFILL home of the `claims`, (first block,
    end) each; then the branch's DECODE homes there went, and with `all_homes` the PREFILL ones too."""

    now_s: float
    tenant: str
    branch_id: str
    node_id: str
    claims: tuple[tuple[int, int], ...]
    all_homes: bool


LogEntry = (
    Began | Heard | KvLanded | OutputMade | RequestDone | BranchesEnded | TimePassed | NodeCame | NodeLost | Turned
)

Log = Callable[[LogEntry], None]
