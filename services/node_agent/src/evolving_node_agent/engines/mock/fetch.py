"""Reading blocks out of peers' L2 for legs in the queue, both ends. Whatever does not arrive is computed.

A leg's fetch goes on in chunks, each in its turn by the leg's rank. A chunk goes into L2 as it arrives and is kept
there until the leg is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

from evolving_node_agent.engines.mock.legs import PrefillLeg
from evolving_node_agent.engines.mock.life import Life
from evolving_node_agent.engines.mock.transport import (
    Connection,
    Disconnected,
    Failed,
    Held,
    Message,
    Page,
    PagesEnd,
    Read,
    paced,
)
from evolving_node_agent.engines.port import Holder, PrefillJob, Tier


async def fetch(life: Life, leg: PrefillLeg) -> None:
    """Bring what holders have and this node lacks into its L2, and have it kept there. Ends early where a holder is
    lost or L2 is full."""
    await leg.fetch.go.wait()
    while True:
        for holder in _in_order(leg.job):
            try:
                await _read_from(life, leg, holder)
            except Disconnected:
                continue  # a lost peer is a miss
        if life.keeping.keep_own(leg):
            break
        await life.keeping.until_room()  # until it is kept, what is here may leave, and is read again
    life.fetch_ended(leg)


def offered_blocks(job: PrefillJob, held: int, reusable: int) -> int:
    """How many leading blocks are here or can be had, when `held` are here."""
    for holder in _in_order(job):
        if holder.first_block <= held:
            held = max(held, min(holder.first_block + holder.blocks, reusable))
    return held


def _in_order(job: PrefillJob) -> list[Holder]:
    return sorted(job.holders, key=lambda each: each.first_block)


async def _read_from(life: Life, leg: PrefillLeg, holder: Holder) -> None:
    names, pool, config = leg.kv.names, life.cache.pool, life.config
    last = min(holder.first_block + holder.blocks, leg.fetch.until)
    connection: Connection | None = None
    try:
        while holder.first_block <= (held := pool.held(names, last)) < last:
            chunk = min(config.fetch.chunk_blocks, last - held)
            if not life.keeping.has_room(leg, held + chunk):
                await life.keeping.until_room()
                continue
            async with life.turns.turn(leg.rank, chunk * config.page_bytes):
                if pool.held(names, last) != held or not life.keeping.has_room(leg, held + chunk):
                    continue  # while it waited, others brought or dropped some
                try:
                    with life.reads.read(leg.fetch, chunk):
                        connection = connection or await Connection.open(
                            holder.pool_address, config.stalled_transport_s
                        )
                        wanted = names[held : held + chunk]
                        await connection.send(Read(holder.incarnation, config.kv_format, wanted))
                        blocks, data = await _receive(connection, len(wanted))
                    stored = _store(life, leg, held, blocks, data)
                finally:
                    life.keeping.room_came()  # for what did not come; and others may lack less than before
                if not stored or blocks < chunk:
                    return
    finally:
        if connection is not None:
            await connection.close()


async def _receive(connection: Connection, wanted: int) -> tuple[int, list[bytes]]:
    """An answer to `Read`: how many leading blocks came, and their bytes where these are sent."""
    blocks, data = 0, list[bytes]()
    whole = True
    message: Message | None = None
    while not isinstance(message, PagesEnd):
        message = await connection.receive()
        match message:
            case Page(_, page) if whole:
                blocks += 1
                data.append(page)
            case Held(count) if whole:
                blocks += count
            case Failed(reason):
                raise Disconnected(reason)
            case _:
                whole = False  # damaged: from this block on there is nothing to reuse
    if blocks > wanted:
        raise Disconnected(f"{blocks} blocks where {wanted} were asked for")
    return blocks, data


def _store(life: Life, leg: PrefillLeg, first: int, blocks: int, data: Sequence[bytes]) -> bool:
    """Put what came into L2 and keep it for the leg; False where L2 had no room for all of it."""
    names, fetch = leg.kv.names, leg.fetch
    if blocks == 0 or life.legs.get(leg.job.leg_id) is not leg or fetch.over:
        return False
    reached = life.cache.store_fetched(names, first, first + blocks, data)
    if reached > first:
        fetch.fetched.append(range(first, reached))
        life.reads.blocks_fetched += reached - first
        life.keeping.keep(leg, reached)
        life.publish()
    if reached < first:
        return life.cache.pool.held(names, first) < first  # those before have left, and are read again
    return reached == first + blocks


async def serve_reads(life: Life, connection: Connection, read: Read) -> None:
    """Answer reads until the peer has enough."""
    while True:
        await _serve_read(life, connection, read)
        message = await connection.receive(patient=True)
        if not isinstance(message, Read):
            return
        read = message


async def _serve_read(life: Life, connection: Connection, read: Read) -> None:
    """Send the leading blocks of `read` that L2 has. Each is copied whole, so none changes while it is sent."""
    config, faults = life.config, life.faults
    if read.incarnation != life.incarnation or read.kv_format != config.kv_format:
        await connection.send(Failed("another incarnation or format"))
        return
    page_s = faults.transfer_delay_s + config.page_bytes / config.fetch_bytes_per_s / config.speed_up
    if config.verify_kv:
        for index, name in enumerate(read.names):
            data = life.cache.read(name, Tier.L2)
            if data is None:
                break
            await life.clock.sleep(page_s)
            await connection.send(Page(index, data), damaged=faults.damages_next_page())
    else:
        sent = 0
        async for pages in paced(life.clock, _leading(life, read.names), page_s, config.stalled_transport_s):
            sent += pages
            if _leading(life, read.names) < sent:
                break  # evicted while it was read
            await connection.send(Held(pages))
    await connection.send(PagesEnd(0))


def _leading(life: Life, names: Sequence[bytes]) -> int:
    return life.cache.pool.matched(names, len(names), Tier.L2)
