"""Prometheus metrics of a process, and the small HTTP server that shows them with health and readiness."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from evolving.runtime.readiness import Readiness
from evolving.runtime.settings import join_address, split_address

# Seconds; from a routing decision to a long generation.
LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_REQUEST_LIMIT_BYTES = 8 * 1024
_REQUEST_TIMEOUT_S = 5.0


class Metrics:
    """This process's metrics. Names get the prefix "evolving_"; units are last in a name (`_seconds`, `_bytes`)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        """A count that only grows; `_total` is added to its name."""
        return Counter(f"evolving_{name}", text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        """A value that goes up and down."""
        return Gauge(f"evolving_{name}", text, labels, registry=self.registry)

    def histogram(
        self, name: str, text: str, labels: Sequence[str] = (), buckets: Sequence[float] = LATENCY_BUCKETS_S
    ) -> Histogram:
        """A distribution; buckets are upper bounds in the name's unit."""
        return Histogram(f"evolving_{name}", text, labels, buckets=buckets, registry=self.registry)

    def follow(self, readiness: Readiness) -> None:
        """Show each condition of a service's readiness as a gauge, read at each scrape."""
        self.registry.register(_Conditions(readiness))

    def exposition(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self.registry)


class _Conditions(Collector):
    def __init__(self, readiness: Readiness) -> None:
        self._readiness = readiness

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """What the registry calls at a scrape."""
        family = GaugeMetricFamily("evolving_condition", "1 while a need of this service is met.", labels=["condition"])
        for name, condition in self._readiness.conditions().items():
            family.add_metric([name], float(bool(condition["ok"])))
        yield family


class MetricsServer:
    """HTTP/1.1 on one address: GET /metrics, /healthz (200 while the process runs) and /readyz (200 or 503)."""

    def __init__(self, metrics: Metrics, readiness: Readiness) -> None:
        self._metrics = metrics
        self._readiness = readiness
        self._server: asyncio.Server | None = None

    async def start(self, listen: str) -> str:
        """Bind `listen` ("host:port"); the address bound, with its real port. Raises OSError."""
        host, port = split_address(listen)
        self._server = await asyncio.start_server(self._serve, host, port, limit=_REQUEST_LIMIT_BYTES)
        return join_address(host, self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            return  # not an HTTP request, or its sender has gone: nobody to answer
        finally:
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        routes: dict[str, Callable[[], tuple[str, str, bytes]]] = {
            "/metrics": lambda: ("200 OK", CONTENT_TYPE_LATEST, self._metrics.exposition()),
            "/healthz": lambda: ("200 OK", "text/plain", b"ok\n"),
            "/readyz": self._ready,
        }
        if path not in routes:
            status, kind, body = "404 Not Found", "text/plain", b"try /metrics, /healthz or /readyz\n"
        elif method not in ("GET", "HEAD"):
            status, kind, body = "405 Method Not Allowed", "text/plain", b"only GET\n"
        else:
            status, kind, body = routes[path]()
        lines = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        return lines.encode() + (b"" if method == "HEAD" else body)

    def _ready(self) -> tuple[str, str, bytes]:
        readiness = self._readiness
        shown = {"ready": readiness.ready, "degraded": readiness.degraded, "conditions": readiness.conditions()}
        body = json.dumps(shown, indent=1)
        status = "200 OK" if readiness.ready else "503 Service Unavailable"
        return status, "application/json", body.encode() + b"\n"
