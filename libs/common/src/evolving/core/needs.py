"""How much a node's copy of a block is needed, as one number that orders what leaves first.

The paper (§4.1, §4.4) evicts by branch count, then by last access. A branch counts one copy in each phase, so what
prefill and decode nodes let go first is the same: the longest unused context of either, and with it both its copies. So
a counted block that another node's host memory has too goes before one that would be lost to the pool.
"""

from __future__ import annotations

_COUNTS_BELOW = 1 << 32


def need(count: int, elsewhere: bool) -> int:
    """What eviction goes by: 0 where no branch counts the copy; least where another node's L2 has the block too; then
    by count."""
    return count if elsewhere or count == 0 else _COUNTS_BELOW + count


def count_of(needed: int) -> int:
    """The count in a `need`."""
    return needed % _COUNTS_BELOW


LANDING = need(1, elsewhere=False)
"""Of a block that a running leg just made: its branch will count it, and nobody else is known to have it."""
