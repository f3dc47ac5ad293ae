"""The last context of each branch, so that a prompt that goes on from it is hashed past it only."""

from __future__ import annotations

from collections import OrderedDict

from evolving.core.blocks import HashedTokens


class Contexts:
    """By tenant and branch, within a bound of memory."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[tuple[str, str], HashedTokens] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size_bytes(self) -> int:
        """Memory in use, roughly."""
        return self._bytes

    def get(self, tenant: str, branch_id: str) -> HashedTokens | None:
        """A branch's last context, if it is still kept."""
        context = self._kept.get((tenant, branch_id))
        if context is not None:
            self._kept.move_to_end((tenant, branch_id))
        return context

    def keep(self, tenant: str, branch_id: str, context: HashedTokens) -> None:
        """This is the branch's context from now on."""
        self.forget(tenant, branch_id)
        self._kept[tenant, branch_id] = context
        self._bytes += _size_bytes(context)
        while self._bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= _size_bytes(dropped)

    def forget(self, tenant: str, branch_id: str) -> None:
        """It will not be asked for again, or must not be gone on from."""
        dropped = self._kept.pop((tenant, branch_id), None)
        if dropped is not None:
            self._bytes -= _size_bytes(dropped)


def _size_bytes(context: HashedTokens) -> int:
    fixed_bytes = 500  # objects and keys
    checkpoint_bytes = 73  # a 32-byte digest, its object and the tuple's slot
    return len(context.tokens) + len(context.names) + checkpoint_bytes * len(context.checkpoints) + fixed_bytes
