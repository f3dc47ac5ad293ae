"""What a service needs before it can serve, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class _Condition:
    once: bool  # needed to begin serving; lost later it only degrades the service
    ok: bool = False
    detail: str = "not yet"
    began: bool = False  # has held at some time

    @property
    def degraded(self) -> bool:
        return self.once and self.began and not self.ok


class Readiness:
    """Named conditions. The service is ready while each of them holds, or has held where it is needed only once, and
    it isn't draining."""

    def __init__(self) -> None:
        self._conditions: dict[str, _Condition] = {}
        self._draining = False
        self._listeners: list[Callable[[bool], None]] = []
        self._last = True

    @property
    def ready(self) -> bool:
        """Whether requests should come here. With no condition named yet: yes."""
        return not self._draining and all(each.ok or each.degraded for each in self._conditions.values())

    @property
    def degraded(self) -> tuple[str, ...]:
        """Conditions that were met once, don't hold now, and don't keep this service from serving."""
        return tuple(name for name, condition in self._conditions.items() if condition.degraded)

    def require(self, *names: str, once: bool = False) -> None:
        """Name conditions that don't hold until `set` says otherwise.

        once: needed to begin serving, and not to go on: etcd, without which a service serves with what it knows.
        """
        for name in names:
            self._conditions.setdefault(name, _Condition(once))
        self._notify()

    def set(self, name: str, ok: bool, detail: str = "") -> None:
        """Say whether a condition holds; `detail` tells people why not."""
        condition = self._conditions.setdefault(name, _Condition(once=False))
        condition.ok, condition.detail, condition.began = ok, detail, condition.began or ok
        self._notify()

    def drain(self) -> None:
        """Not ready from now on, for good."""
        self._draining = True
        self._notify()

    def conditions(self) -> dict[str, dict[str, object]]:
        """Each condition with "ok" and, where given, "detail"."""
        shown: dict[str, dict[str, object]] = {
            name: {"ok": condition.ok, **({"detail": condition.detail} if condition.detail else {})}
            for name, condition in self._conditions.items()
        }
        if self._draining:
            shown["draining"] = {"ok": False, "detail": "stopping"}
        return shown

    def on_change(self, listener: Callable[[bool], None]) -> None:
        """Call `listener(ready)` now and whenever readiness flips."""
        self._last = self.ready
        self._listeners.append(listener)
        listener(self._last)

    def _notify(self) -> None:
        if self.ready != self._last:
            self._last = self.ready
            for listener in self._listeners:
                listener(self._last)
