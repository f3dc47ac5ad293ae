"""What the split says of this node, followed in etcd."""

from __future__ import annotations

from collections.abc import Callable

from evolving.core.terms import Role
from evolving.runtime.discovery import read_record
from evolving.runtime.keys import Keys, Split
from evolving.runtime.log import get_logger
from evolving.runtime.store import Store, Versioned

_log = get_logger(__name__)


class RoleWatch:
    """This node's role and the newest epoch. A split that vanished stays in force: serving never waits for etcd."""

    def __init__(self, node_id: str, changed: Callable[[], None]) -> None:
        self._node_id = node_id
        self._changed = changed
        self._role = Role.MIXED
        self._draining = False
        self._heard_epoch = 0
        self.epoch = 0  # of the split the role comes from

    @property
    def role(self) -> Role:
        """MIXED until a split names this node; DRAINING for good once `drain` was called."""
        return Role.DRAINING if self._draining else self._role

    def drain(self) -> None:
        """This node takes no new work any more."""
        self._draining = True
        self._changed()

    @property
    def newest_epoch(self) -> int:
        """The newest epoch heard of, from etcd or a caller; callers that know an older one look it up."""
        return max(self.epoch, self._heard_epoch)

    def heard(self, epoch: int) -> None:
        """A caller knows this epoch. The role itself changes only by the split in etcd."""
        self._heard_epoch = max(self._heard_epoch, epoch)

    async def watch(self, store: Store, keys: Keys) -> None:
        """Follow the split, for ever."""
        async for batch in store.watch(keys.split):
            for item in batch.puts:
                if item.key == keys.split:
                    self._adopt(item)

    def _adopt(self, item: Versioned) -> None:
        split = read_record(Split, item)
        if split is None or split.epoch < self.epoch:
            return
        role = Role[split.roles.get(self._node_id, "mixed").upper()]
        if role is not self._role:
            _log.info("role", role=role.name.lower(), was=self._role.name.lower(), epoch=split.epoch)
        self._role, self.epoch = role, split.epoch
        self._changed()
