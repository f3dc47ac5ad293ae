"""Clock, log, readiness and the records in etcd."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
from typing import Any

import pytest
import structlog

from evolving.runtime import log
from evolving.runtime.clock import ManualClock
from evolving.runtime.keys import BadRecord, Keys, NodeRegistration, ServiceRegistration, Split, decode, encode
from evolving.runtime.metrics import Metrics
from evolving.runtime.readiness import Readiness

NODE = NodeRegistration(
    node_id="node-a",
    incarnation="i1",
    address="127.0.0.1:1",
    model="m",
    kv_format="f",
    block_tokens=64,
    vocab_size=1000,
    max_prompt_tokens=2048,
    max_context_tokens=4096,
    l1_tokens=1 << 16,
    reserve_tokens=4096,
    l2_tokens=1 << 20,
    decode_slots=8,
    chunk_tokens=512,
    kv_bytes_per_token=4,
    transfer_address="127.0.0.1:2",
    pool_address="127.0.0.1:3",
    prefill_coefficients=(0.01, 1e-4, 1e-9, 1e-6, 1e-7),
    decode_coefficients=(0.01, 0.0, 1e-3, 1e-7),
)


async def test_sleepers_wake_in_their_order_and_at_their_moment() -> None:
    clock = ManualClock(now_s=100.0)
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, duration_s: float) -> None:
        await clock.sleep(duration_s)
        woken.append((name, clock.now_s()))

    tasks = [asyncio.create_task(sleeper(name, s)) for name, s in (("b", 2), ("a", 1), ("c", 2), ("z", 99))]
    wall_s = clock.wall_s()
    await clock.advance(5)
    assert woken == [("a", 101.0), ("b", 102.0), ("c", 102.0)]
    assert clock.now_s() == 105.0
    assert clock.wall_s() == wall_s + 5
    tasks[-1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_sleeper_that_sleeps_again_is_woken_within_the_same_advance() -> None:
    clock = ManualClock()
    ticks: list[float] = []

    async def ticker() -> None:
        while True:
            await clock.sleep(1)
            ticks.append(clock.now_s())

    task = asyncio.create_task(ticker())
    await clock.advance(3)
    assert ticks == [1.0, 2.0, 3.0]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture(autouse=True)
def _restore_logging() -> object:
    import logging

    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    yield
    root.handlers[:], root.level = before
    structlog.reset_defaults()


def test_a_line_is_json_with_service_and_ids(stream: io.StringIO) -> None:
    log.configure("gateway", stream=stream)
    with log.log_context(request_id="r", branch_id="b", tenant=""):
        log.get_logger().info("routed", node="n")
    log.get_logger().info("later")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert {key: first[key] for key in ("service", "event", "request_id", "branch_id", "node", "level")} == {
        "service": "gateway",
        "event": "routed",
        "request_id": "r",
        "branch_id": "b",
        "node": "n",
        "level": "info",
    }
    assert "tenant" not in first
    assert "request_id" not in second


def test_secrets_are_never_written_and_token_counts_are(stream: io.StringIO) -> None:
    log.configure("gateway", stream=stream)
    log.get_logger().info(
        "call", authorization="Bearer abc", bearer_token="abc", metadata={"Authorization": "abc"}, prompt_tokens=12
    )
    assert "abc" not in stream.getvalue()
    assert json.loads(stream.getvalue())["prompt_tokens"] == 12


def test_levels_below_the_configured_one_are_dropped(stream: io.StringIO) -> None:
    import logging

    log.configure("gateway", level="warning", stream=stream)
    log.get_logger().info("quiet")
    logging.getLogger("a.library").info("quiet too")
    assert stream.getvalue() == ""
    logging.getLogger("a.library").warning("a library %s", "speaks")
    assert json.loads(stream.getvalue())["event"] == "a library speaks"


def test_exceptions_are_structured(stream: io.StringIO) -> None:
    log.configure("gateway", stream=stream)
    try:
        raise ValueError("why")
    except ValueError as error:
        log.get_logger().error("failed", exc_info=error)
    assert json.loads(stream.getvalue())["exception"][0]["exc_type"] == "ValueError"


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_trace_shows_no_values(log_format: log.LogFormat, stream: io.StringIO) -> None:

    def serve(prompt: str) -> None:
        raise ValueError("why")

    log.configure("gateway", log_format=log_format, stream=stream)
    try:
        serve("-".join(["what", "the", "user", "wrote"]))
    except ValueError as error:
        log.get_logger().error("failed", exc_info=error)
    assert "ValueError" in stream.getvalue()
    assert "what-the-user-wrote" not in stream.getvalue()


def test_console_lines_are_for_people(stream: io.StringIO) -> None:
    log.configure("gateway", log_format="console", stream=stream)
    log.get_logger().info("routed", node="n")
    assert "routed" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


def test_readiness_is_every_condition_and_tells_flips_only() -> None:
    readiness = Readiness()
    told: list[bool] = []
    readiness.require("etcd", "nodes")
    readiness.on_change(told.append)
    readiness.set("etcd", True)
    readiness.set("nodes", True)
    readiness.set("nodes", True)
    assert readiness.ready
    readiness.set("etcd", False, "does not answer")
    assert readiness.conditions()["etcd"] == {"ok": False, "detail": "does not answer"}
    readiness.set("etcd", True)
    readiness.drain()
    readiness.set("etcd", True)
    assert not readiness.ready
    assert told == [False, True, False, True, False]


def test_what_is_needed_once_degrades_when_it_is_lost() -> None:
    readiness = Readiness()
    readiness.require("etcd", once=True)
    assert (readiness.ready, readiness.degraded) == (False, ())
    readiness.set("etcd", False, "does not answer")
    assert not readiness.ready  # it never held
    readiness.set("etcd", True)
    assert (readiness.ready, readiness.degraded) == (True, ())
    readiness.set("etcd", False, "does not answer")
    assert (readiness.ready, readiness.degraded) == (True, ("etcd",))
    assert readiness.conditions()["etcd"] == {"ok": False, "detail": "does not answer"}


def test_conditions_are_metrics() -> None:
    readiness, metrics = Readiness(), Metrics()
    metrics.follow(readiness)
    readiness.require("nodes")
    readiness.set("etcd", True)
    shown = metrics.exposition().decode()
    assert 'evolving_condition{condition="etcd"} 1.0' in shown
    assert 'evolving_condition{condition="nodes"} 0.0' in shown


def test_requiring_what_is_already_there_keeps_it() -> None:
    readiness = Readiness()
    readiness.set("etcd", True)
    readiness.require("etcd")
    assert readiness.ready


@pytest.mark.parametrize(
    "record",
    [
        NODE,
        Split(3, {"node-a": "prefill", "node-b": "decode"}, "more decode work", "planner", 1.5),
        ServiceRegistration("gateway", "g1", "127.0.0.1:1", "0.1.0", 1.5),
    ],
)
def test_records_survive_encoding(record: NodeRegistration | Split | ServiceRegistration) -> None:
    kind: Any = type(record)
    assert decode(kind, encode(record)) == record


def test_fields_of_a_later_version_are_ignored() -> None:
    value = {**json.loads(encode(NODE)), "added_later": 1}
    assert decode(NodeRegistration, json.dumps(value).encode()) == NODE


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"block_tokens": 0}, "block_tokens"),
        ({"node_id": ""}, "node_id"),
        ({"prefill_coefficients": [1, 2]}, "prefill_coefficients"),
        ({"decode_coefficients": [1, 2, 3, -4]}, "decode_coefficients"),
        ({"address": None}, "address"),
    ],
)
def test_a_wrong_record_is_refused_with_its_field(change: dict[str, object], field: str) -> None:
    value = {**dataclasses.asdict(NODE), **change}
    with pytest.raises(BadRecord, match=field):
        decode(NodeRegistration, json.dumps(value).encode())


@pytest.mark.parametrize("value", [b"", b"{}", b"[]", b"\xff\xfe", b'{"epoch": 1}', b"null"])
def test_what_is_no_record_is_refused(value: bytes) -> None:
    with pytest.raises(BadRecord):
        decode(Split, value)


def test_keys_of_partitions_are_apart() -> None:
    keys = Keys("/evolving/", "p1")
    assert keys.node("a") == "/evolving/p1/nodes/a"
    assert keys.node("a").startswith(keys.nodes)
    assert keys.split == "/evolving/p1/split"
    assert keys.leader("planner") == "/evolving/p1/leaders/planner"
    assert keys.service("gateway", "g").startswith(keys.services("gateway"))
    assert not Keys("/evolving", "p1").nodes.startswith(Keys("/evolving", "p").root + "/")
    with pytest.raises(AssertionError):
        keys.node("a/b")
