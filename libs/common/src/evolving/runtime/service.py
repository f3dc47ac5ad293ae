"""The life of a service process: settings → loop → servers → signal → drain → exit status."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from importlib.metadata import version
from typing import Any, Generic, TypeVar

import uvloop

from evolving.runtime.clock import Clock, SystemClock
from evolving.runtime.credentials import Credentials
from evolving.runtime.etcd import EtcdStore
from evolving.runtime.guard import Limits
from evolving.runtime.keys import ServiceKind, ServiceRegistration, encode
from evolving.runtime.log import configure, get_logger
from evolving.runtime.metrics import Metrics, MetricsServer
from evolving.runtime.readiness import Readiness
from evolving.runtime.registration import Registration
from evolving.runtime.server import GrpcServer
from evolving.runtime.settings import ServiceSettings, SettingsError
from evolving.runtime.store import Store

Settings = TypeVar("Settings", bound=ServiceSettings)
EXIT_OK, EXIT_FAILED, EXIT_SETTINGS = 0, 1, 2
# Of the grace period, kept for what comes after calls have ended: closing stores, engines, files.
_CLEANUP_SHARE, _CLEANUP_MAX_S = 0.2, 5.0
_log = get_logger(__name__)


class Service(Generic[Settings]):
    """What a service's `main` coroutine works with. Made by `run_service`.

    A main names what it needs (`ready.require`), adds its servicers (`server.add`), calls `await start()`, starts its
    loops (`spawn`), and ends with `await serve()`, which returns once calls have drained; then it closes what it
    opened.
    """

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self.settings = settings
        self.clock = clock
        self.metrics = Metrics()
        self.ready = Readiness()
        self.metrics.follow(self.ready)
        self.server = GrpcServer(
            Credentials(settings.credentials_file, clock),
            Limits(settings.max_concurrent_calls, settings.default_deadline_s),
            self.metrics,
            self.ready,
            clock,
            settings.max_message_bytes,
        )
        self.address = ""  # what others reach this service by; set by start()
        self.metrics_address = ""  # bound address of the HTTP server; set by start()
        self._http = MetricsServer(self.metrics, self.ready)
        self._stop = asyncio.Event()
        self._deadline_s: float | None = None  # of everything, once stopping
        self._failed = False
        self._serving = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_drain: list[Callable[[], Awaitable[None]]] = []
        self._on_kill: list[Callable[[], None]] = []

    @property
    def stopping(self) -> bool:
        """Whether a signal, `stop` or a failed loop has begun the drain."""
        return self._stop.is_set()

    @property
    def serving(self) -> bool:
        """Whether `main` has come to `serve`. Until then a signal cancels it: there is nothing to drain."""
        return self._serving

    @property
    def failed(self) -> bool:
        """Whether a loop of this service died; the exit status is then 1."""
        return self._failed

    def open_store(self) -> EtcdStore:
        """A store on the etcd of the settings; the caller closes it.

        Condition "etcd" follows it. It must hold once; a service that loses etcd later goes on with what it knows.
        """
        self.ready.require("etcd", once=True)
        return EtcdStore(
            self.settings.etcd_endpoints,
            clock=self.clock,
            timeout_s=self.settings.etcd_timeout_s,
            on_ready=lambda ready: self.ready.set("etcd", ready, "" if ready else "etcd does not answer"),
        )

    async def start(self) -> str:
        """Bind the gRPC and HTTP servers; the advertised address. Raises SettingsError when a port is taken."""
        settings = self.settings
        bound = await self.server.start(settings.listen)
        self.address = settings.advertised(bound)
        self.ready.on_change(self._show_health)
        if settings.metrics_listen:
            try:
                self.metrics_address = await self._http.start(settings.metrics_listen)
            except OSError as error:
                raise SettingsError(
                    f"--metrics-listen: {settings.metrics_listen} can't be bound ({error}); give a free port"
                ) from error
        _log.info("listening", grpc=bound, advertised=self.address, http=self.metrics_address)
        return self.address

    def announce(self, store: Store, kind: ServiceKind, instance: str = "") -> Registration:
        """Let others find this instance, until first thing in its drain. Call after `start`.

        instance: unique among instances of the kind; "": its address.
        """
        name = instance or self.address
        record = ServiceRegistration(kind, name, self.address, version(f"evolving-{kind}"), self.clock.wall_s())
        return self.register(store, self.settings.keys.service(kind, name), encode(record))

    def register(self, store: Store, key: str, value: bytes) -> Registration:
        """Keep a key in etcd that is withdrawn first thing in a drain, so that others stop sending here."""
        registration = store.register(key, value, self.settings.registration_ttl_s)
        self.on_drain(registration.close)
        self.spawn(registration.wait_closed(), f"registration:{key}")
        return registration

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a loop of this service beside the servers. If it raises, the service drains and exits 1. It is
        cancelled after the drain."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def on_drain(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Await `callback` when the drain begins, before calls are refused; newest first."""
        self._on_drain.append(callback)

    def on_kill(self, callback: Callable[[], None]) -> None:
        """Call `callback` right before an immediate exit (second signal, or a drain that hangs): kill children here."""
        self._on_kill.append(callback)

    async def wait_stopping(self) -> None:
        """Wait until the drain begins."""
        await self._stop.wait()

    def stop(self) -> None:
        """Begin the drain, as SIGTERM does."""
        if not self._stop.is_set():
            self._deadline_s = self.clock.now_s() + self.settings.grace_s
            self._stop.set()

    async def serve(self) -> None:
        """Serve until told to stop, then drain: not ready, `on_drain` callbacks, no new calls, running ones get what
        is left of the grace period, then they are cancelled. Returns with the servers stopped."""
        self._serving = True
        await self.wait_stopping()
        assert self._deadline_s is not None
        _log.info("draining", in_flight=self.server.guard.in_flight, grace_s=self.settings.grace_s)
        self.ready.drain()
        await self.server.update_health()
        reserve_s = min(_CLEANUP_MAX_S, _CLEANUP_SHARE * self.settings.grace_s)
        for callback in reversed(self._on_drain):
            try:
                async with asyncio.timeout(reserve_s / 2):
                    await callback()
            except Exception as error:  # noqa: BLE001 - a step that fails must not keep the process from stopping
                _log.warning("drain_step_failed", step=repr(callback), exc_info=error)
        await self.server.stop(max(0.0, self._deadline_s - reserve_s - self.clock.now_s()))
        await self._http.stop()

    async def close(self) -> bool:
        """Cancel the loops; whether they ended in what is left of the grace period."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if not tasks:
            return True
        _, pending = await asyncio.wait(tasks, timeout=self.remaining_s())
        return not pending

    def remaining_s(self) -> float:
        """What is left of the grace period once stopping."""
        assert self._deadline_s is not None
        return max(0.0, self._deadline_s - self.clock.now_s())

    def exit_now(self, status: int) -> None:
        """End the process this instant, after the `on_kill` callbacks."""
        for callback in self._on_kill:
            callback()
        os._exit(status)

    def handle_signal(self, number: int) -> None:
        """First: drain. Second: exit at once."""
        if self.stopping:
            _log.warning("killed", signal=signal.Signals(number).name)
            self.exit_now(128 + number)
        _log.info("signal", signal=signal.Signals(number).name)
        self.stop()

    def _show_health(self, _ready: bool) -> None:
        self.spawn(self.server.update_health(), "health")

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("loop_failed", loop=task.get_name(), exc_info=error)
            self._failed = True
            self.stop()


def run_service(settings: Settings, main: Callable[[Service[Settings]], Coroutine[Any, Any, None]]) -> int:
    """Run a service until it is told to stop; the process's exit status.

    0: drained after SIGTERM or SIGINT. 1: `main` or a loop failed, or the drain overran its grace period.
    2: the settings can't work (a port is taken, a file is unreadable).
    """
    configure(settings.service, settings.log_level, settings.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(settings, main))


async def _run(settings: Settings, main: Callable[[Service[Settings]], Coroutine[Any, Any, None]]) -> int:
    try:
        service = Service(settings, SystemClock())
    except SettingsError as error:
        _log.error("settings_refused", problems=error.problems)
        return EXIT_SETTINGS
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.handle_signal, number)
    body = asyncio.create_task(main(service), name="main")
    stopped = asyncio.create_task(service.wait_stopping(), name="stopping")
    await asyncio.wait((body, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    service.stop()  # a main that ended by itself: from here on everything is bounded by the grace period
    if not body.done():
        if not service.serving:
            body.cancel()
        await asyncio.wait((body,), timeout=service.remaining_s())
    if not body.done() or not await service.close():
        _log.error("drain_overran", grace_s=settings.grace_s)
        service.exit_now(EXIT_FAILED)
    try:
        body.result()
    except asyncio.CancelledError:
        await service.server.stop(0)
        _log.info("stopped_before_serving")
    except SettingsError as error:
        _log.error("settings_refused", problems=error.problems)
        return EXIT_SETTINGS
    except Exception as error:  # noqa: BLE001 - the process ends with it, and says so
        _log.critical("service_failed", exc_info=error)
        return EXIT_FAILED
    _log.info("stopped", failed=service.failed)
    return EXIT_FAILED if service.failed else EXIT_OK
