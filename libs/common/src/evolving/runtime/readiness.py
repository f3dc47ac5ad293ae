"""What a service needs before it can serve, by name."""

from __future__ import annotations

from collections.abc import Callable


class Readiness:
    """Named conditions. The service is ready while each of them is true and it isn't draining."""

    def __init__(self) -> None:
        self._conditions: dict[str, tuple[bool, str]] = {}
        self._draining = False
        self._listeners: list[Callable[[bool], None]] = []
        self._last = True

    @property
    def ready(self) -> bool:
        """Whether requests should come here. With no condition named yet: yes."""
        return not self._draining and all(ok for ok, _ in self._conditions.values())

    def require(self, *names: str) -> None:
        """Name conditions that are false until `set` says otherwise."""
        for name in names:
            self._conditions.setdefault(name, (False, "not yet"))
        self._notify()

    def set(self, name: str, ok: bool, detail: str = "") -> None:
        """Say whether a condition holds; `detail` tells people why not."""
        self._conditions[name] = (ok, detail)
        self._notify()

    def drain(self) -> None:
        """Not ready from now on, for good."""
        self._draining = True
        self._notify()

    def conditions(self) -> dict[str, dict[str, object]]:
        """Each condition with "ok" and, where given, "detail"."""
        shown: dict[str, dict[str, object]] = {
            name: {"ok": ok, "detail": detail} if detail else {"ok": ok}
            for name, (ok, detail) in self._conditions.items()
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
