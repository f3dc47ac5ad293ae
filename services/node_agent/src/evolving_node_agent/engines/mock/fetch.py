"""Reading blocks out of peers' L2 before a prefill, both ends. Whatever does not arrive is computed."""

from __future__ import annotations

import asyncio

from evolving_node_agent.engines.mock.legs import PrefillLeg
from evolving_node_agent.engines.mock.life import Life
from evolving_node_agent.engines.mock.transport import Connection, Disconnected, Failed, Page, PagesEnd, Read
from evolving_node_agent.engines.port import Holder, Tier


async def fetch(life: Life, leg: PrefillLeg) -> None:
    """Bring what holders have and this node lacks into its L2, until the leg's deadline."""
    if not leg.job.holders:
        return
    started_s = life.clock.now_s()
    deadline = asyncio.create_task(life.clock.sleep(leg.job.fetch_deadline_s))
    reading = asyncio.create_task(_read_all(life, leg))
    try:
        await asyncio.wait({deadline, reading}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        deadline.cancel()
        reading.cancel()
    leg.fetch_s = life.clock.now_s() - started_s
    if reading.done() and not reading.cancelled():
        reading.result()  # a bug must not pass for a slow peer


async def _read_all(life: Life, leg: PrefillLeg) -> None:
    reusable = (len(leg.job.tokens) - 1) // life.config.block_tokens
    names = leg.kv.names[:reusable]
    for holder in sorted(leg.job.holders, key=lambda each: each.first_block):
        held = life.cache.held(names)
        wanted = names[held : holder.first_block + holder.blocks]
        if not wanted or held < holder.first_block:
            continue
        try:
            await _read_from(life, leg, holder, wanted, names[held - 1] if held else None)
        except Disconnected:
            continue  # a lost peer is a miss


async def _read_from(life: Life, leg: PrefillLeg, holder: Holder, wanted: list[bytes], parent: bytes | None) -> None:
    connection = await Connection.open(holder.pool_address, life.config.stalled_transport_s)
    try:
        await connection.send(Read(holder.incarnation, life.config.kv_format, wanted))
        for name in wanted:
            message = await connection.receive()
            # Damaged and the end mean the same here: from this block on there is nothing to reuse.
            if not isinstance(message, Page) or not life.cache.store_fetched(name, parent, message.data):
                return
            leg.fetched.add(name)
            life.publish()
            parent = name
    finally:
        await connection.close()


async def serve_read(life: Life, connection: Connection, read: Read) -> None:
    """Send the leading blocks of `read` that L2 has. Each is copied whole, so none changes while it is sent."""
    if read.incarnation != life.incarnation or read.kv_format != life.config.kv_format:
        await connection.send(Failed("another incarnation or format"))
        return
    for index, name in enumerate(read.names):
        data = life.cache.read(name, Tier.L2)
        if data is None:
            break
        await life.clock.sleep(life.faults.transfer_delay_s + len(data) / life.config.fetch_bytes_per_s)
        await connection.send(Page(index, data), damaged=life.faults.damages_next_page())
    await connection.send(PagesEnd(0))
