"""The engine process: `python -m evolving_node_agent.engines.sglang.host --channel-fd N --config JSON`.

Started by `SglangEngine`; of no use by hand.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import socket
import sys
import threading
import uuid
from typing import Any

import msgspec

from evolving_node_agent.engines.sglang.config import SglangConfig
from evolving_node_agent.engines.sglang.framing import receive_frame

from .inbox import Inbox

logger = logging.getLogger(__name__)


def main() -> int:
    """Build the engine, then serve until told to stop or until the node agent is gone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.add_argument("--config", type=json.loads, required=True)
    options = parser.parse_args()
    channel = socket.socket(fileno=options.channel_fd)
    channel.set_inheritable(False)
    # Before torch is imported: spinning and many threads make engines that share cores many times slower.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    config = msgspec.convert(options.config, SglangConfig)
    # What nodes of the cluster know each other by comes this way, for a command line can be read by anyone.
    secret = receive_frame(channel)
    if secret is None:
        _exit(0)  # the node agent is gone
        return 0
    _watch_parent_while_building(channel)
    inbox = Inbox()
    from .launch import build_scheduler

    scheduler = build_scheduler(config, inbox)
    _start_service(scheduler, config, inbox, channel, secret)
    try:
        scheduler.run_event_loop()
    except Exception:
        logger.exception("the scheduler failed")
        _exit(1)
    _exit(0)
    return 0


def _start_service(scheduler: Any, config: SglangConfig, inbox: Inbox, channel: socket.socket, secret: bytes) -> None:
    """Run the service's loop in its own thread."""
    from .launch import engine_info, open_transport
    from .service import Service

    transport = open_transport(config, secret)
    for address, size in scheduler.desk.blocks.pages.regions():
        transport.register(address, size)
    info = engine_info(scheduler, config, uuid.uuid4().hex)

    def stop() -> None:
        scheduler.gracefully_exit = True

    async def serve() -> None:
        service = Service(scheduler.desk, inbox, transport, config.fetch, info, secret, stop)
        await service.run(channel, config.bind_host, config.peer_host, config.port)

    def run() -> None:
        try:
            asyncio.run(serve())
        except Exception:
            logger.exception("the service failed")
            _exit(1)

    threading.Thread(target=run, name="service", daemon=True).start()


def _watch_parent_while_building(channel: socket.socket) -> None:
    """Exit when the node agent goes away before the service reads the channel."""

    def watch() -> None:
        if channel.recv(1, socket.MSG_PEEK) == b"":
            _exit(0)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _exit(status: int) -> None:
    """Leave without running finalizers: native threads of the transport and of torch would still be running."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    raise SystemExit(main())
