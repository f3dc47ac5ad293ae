"""Streams and events of a device that does everything at once, in order."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

_HOST_MEMORY_KEPT_FREE_BYTES = 1 << 30


class Event:
    """Always done; remembers when it was recorded."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._recorded_s = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self._recorded_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Work before this event is done."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds from this event to `later`."""
        return (later._recorded_s - self._recorded_s) * 1e3


class Stream:
    """A queue that is always empty."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Event) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: Stream) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        """An event at this point."""
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        """All work is done."""
        return True


_only_stream = Stream()


@contextlib.contextmanager
def _on_stream(stream: Stream) -> Iterator[Stream]:
    yield stream


def _current_stream(device: Any = None) -> Stream:
    return _only_stream


def install() -> None:
    """Put the classes where SGLang looks for a device module's streams."""
    module: Any = torch.cpu
    module.Event = Event
    module.Stream = Stream
    module.stream = _on_stream
    module.current_stream = _current_stream


def adapt_host_pools() -> None:
    """Host pools in plain memory: nothing to pin, and a small machine has no 10 GiB to keep free."""
    from sglang.srt.mem_cache.pool_host import base, common

    def register_nothing(buffer: torch.Tensor, *_: Any) -> None:
        setattr(buffer, common._CUDA_HOST_REGISTERED_RANGES_ATTR, [])

    common._cuda_host_register = register_nothing
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = _HOST_MEMORY_KEPT_FREE_BYTES
    construct = base.HostKVCache.__init__

    def construct_unpinned(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["pin_memory"] = False
        construct(self, *args, **kwargs)

    base.HostKVCache.__init__ = construct_unpinned
