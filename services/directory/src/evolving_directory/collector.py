"""Keep pauses of Python's cycle collector short while millions of blocks are kept.

The index is freed by reference counts; it holds no cycles. A full collection walks all of it nevertheless, and its
pause grows with it. So whatever survived a collection that took long is set aside: later ones walk only what is new.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

from evolving.runtime.clock import Clock

_LONG_S = 0.01
_FULL = 2  # the oldest generation


class ShortCollections:
    """Once per process: see `begin`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started_s = 0.0

    def __call__(self, phase: str, info: Mapping[str, Any]) -> None:
        """What `gc` calls at the start and the end of each collection."""
        if info["generation"] != _FULL:
            return
        if phase == "start":
            self._started_s = self._clock.now_s()
        elif self._clock.now_s() - self._started_s >= _LONG_S:
            gc.freeze()

    def end(self) -> None:
        """Leave the collector as it was: what else runs in the process may count on it."""
        gc.callbacks.remove(self)
        gc.unfreeze()


def begin(clock: Clock) -> ShortCollections:
    """Set aside what lives from the start on, and watch collections until `end`."""
    watch = ShortCollections(clock)
    gc.collect()
    gc.freeze()
    gc.callbacks.append(watch)
    return watch
