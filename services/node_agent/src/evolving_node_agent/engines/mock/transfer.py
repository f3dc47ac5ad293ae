"""Bringing a prompt's KV from its prefill leg to its decode leg, both ends. On one node nothing is sent.

A decode leg claims the KV first and asks for it once it has room. From then on whoever's leg ends closes the
connection, and that ends the other leg: with SourceLost or DecodeLost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from evolving_node_agent.engines.mock.legs import DecodeLeg, PrefillLeg, PrefillStage
from evolving_node_agent.engines.mock.life import Life
from evolving_node_agent.engines.mock.transport import (
    Claim,
    Connection,
    Damaged,
    Disconnected,
    Dismiss,
    Failed,
    Held,
    Landed,
    Message,
    Page,
    PagesEnd,
    Pull,
    Resend,
    Waiting,
    paced,
)
from evolving_node_agent.engines.port import DecodeJob, DecodeLost, SourceLost

_RESENDS = 3  # rounds of pages that came damaged; then the link is given up


async def pull(life: Life, leg: DecodeLeg) -> None:
    """Claim the prompt's KV, bring it to `leg` once it has room, and start it; or end it with SourceLost."""
    if leg.job.source_address == life.address:
        await _take_over(life, leg)
        return
    try:
        connection = await Connection.open(leg.job.source_address, life.config.stalled_transport_s)
        try:
            await _pull_over(life, leg, connection)
        finally:
            await connection.close()
    except Disconnected as error:
        life.end(leg, SourceLost(f"{leg.job.source_node_id}: {error}"))


async def dismiss(life: Life, job: DecodeJob) -> None:
    """Tell a prefill leg that its decode leg, which had its room, ended before it could come. If that fails, `keep_s`
    ends it."""
    if job.source_address == life.address:
        dismissed(life, job.transfer_id)
        return
    try:
        connection = await Connection.open(job.source_address, life.config.stalled_transport_s)
        try:
            await connection.send(Dismiss(job.transfer_id))
        finally:
            await connection.close()
    except Disconnected:
        return  # its node is gone, and the leg with it


def dismissed(life: Life, transfer_id: int) -> None:
    """Its decode leg will not come. One that came already speaks for itself by its connection."""
    leg = life.transfers.get(transfer_id)
    if leg is not None and not leg.pulled:
        life.end(leg, DecodeLost("the decode leg ended"))


async def _take_over(life: Life, leg: DecodeLeg) -> None:
    """Both legs are here: the prompt's blocks are shared, and only its incomplete page is copied."""
    source = await life.transfers.find(leg.job.transfer_id)
    if source is not None:
        source.claims.add(leg)
        try:
            await leg.reserved.wait()
        finally:
            source.claims.discard(leg)
    if source is None or source.pulled or source.stage is PrefillStage.OVER:
        life.end(leg, SourceLost(f"no prefill leg offers transfer {leg.job.transfer_id}"))
        return
    source.pulled = True
    life.pair(source, leg)
    await source.ready.wait()
    wanted = range(leg.cached_blocks, _pages(life, source)) if life.config.verify_kv else range(0)
    pages = [source.kv.page(index) for index in wanted]
    life.landed(leg, pages, source.first_token, 0.0, len(leg.job.tokens))
    life.sent(source, 0.0, 0)


async def _pull_over(life: Life, leg: DecodeLeg, connection: Connection) -> None:
    await connection.send(Claim(leg.job.transfer_id))
    await leg.reserved.wait()
    await connection.send(Pull(life.config.kv_format, leg.cached_blocks))
    wanted = range(leg.cached_blocks, life.config.pages(len(leg.job.tokens)))
    got: dict[int, bytes] = {}
    held = 0  # pages that came by name alone
    resends = 0
    started_s = life.clock.now_s()
    while True:
        message = await connection.receive()
        match message:
            case Waiting():
                started_s = life.clock.now_s()
            case Page(index, data):
                got[index] = data
            case Held(pages):
                held += pages
            case Damaged():
                continue  # its page will be missing at the end
            case PagesEnd(first_token):
                missing = [index for index in wanted[held:] if index not in got]
                if not missing:
                    data_of = [got[index] for index in wanted[held:]]
                    cached_tokens = leg.cached_blocks * life.config.block_tokens
                    life.landed(leg, data_of, first_token, life.clock.now_s() - started_s, cached_tokens)
                    await connection.send(Landed())
                    return
                if resends == _RESENDS:
                    raise Disconnected("pages keep coming damaged")
                resends += 1
                await connection.send(Resend(missing))
            case Failed(reason):
                raise Disconnected(reason)
            case _:
                raise Disconnected(f"unexpected {type(message).__name__}")


async def serve_claim(life: Life, connection: Connection, claim: Claim) -> None:
    """Keep a prefill leg's KV for a decode leg until that asks for it, and send it once it is computed.

    Whatever breaks between Pull and Landed ends the prefill leg with DecodeLost, nothing before that does.
    """
    leg = await life.transfers.find(claim.transfer_id)
    if leg is None:
        await connection.send(Failed(f"no prefill leg offers transfer {claim.transfer_id}"))
        return
    leg.claims.add(connection)
    try:
        pull = await connection.receive(patient=True)
        if not isinstance(pull, Pull):
            raise Disconnected(f"unexpected {type(pull).__name__}")
        offered = not leg.pulled and leg.stage is not PrefillStage.OVER
        if not offered or pull.kv_format != life.config.kv_format:
            await connection.send(Failed(f"no prefill leg offers transfer {claim.transfer_id}"))
            return
        leg.pulled = True
    finally:
        leg.claims.discard(connection)
    await _serve_pull(life, leg, connection, pull)


async def _serve_pull(life: Life, leg: PrefillLeg, connection: Connection, pull: Pull) -> None:
    inbox: asyncio.Queue[Message] = asyncio.Queue()
    listener = asyncio.create_task(_listen(life, leg, connection, inbox))
    serving = asyncio.current_task()
    assert serving is not None
    leg.tasks += [listener, serving]  # the end of the leg ends both, and with them the connection
    try:
        await _serve(life, leg, connection, pull.first_block, inbox)
    except (Disconnected, TimeoutError) as error:
        life.end(leg, DecodeLost(f"{type(error).__name__}: {error}"))
    finally:
        listener.cancel()


async def _listen(life: Life, leg: PrefillLeg, connection: Connection, inbox: asyncio.Queue[Message]) -> None:
    message: Message | None = None
    try:
        while not isinstance(message, Landed):
            message = await connection.receive(patient=True)
            inbox.put_nowait(message)
    except Disconnected as error:
        life.end(leg, DecodeLost(str(error)))


async def _serve(
    life: Life, leg: PrefillLeg, connection: Connection, first_block: int, inbox: asyncio.Queue[Message]
) -> None:
    silence_s = life.config.stalled_transport_s
    while not leg.ready.is_set():
        try:
            async with asyncio.timeout(silence_s / 4):
                await leg.ready.wait()
        except TimeoutError:
            await connection.send(Waiting())
    await connection.send(Waiting())  # from here on the other side counts transfer time
    started_s = life.clock.now_s()
    size = 0
    indices: Sequence[int] = range(first_block, _pages(life, leg))
    while True:
        size += await _send_pages(life, leg, connection, indices)
        async with asyncio.timeout(silence_s):
            answer = await inbox.get()
        match answer:
            case Landed():
                life.sent(leg, life.clock.now_s() - started_s, size)
                return
            case Resend(missing):
                indices = [index for index in missing if 0 <= index < _pages(life, leg)]
            case _:
                raise Disconnected(f"unexpected {type(answer).__name__}")


async def _send_pages(life: Life, leg: PrefillLeg, connection: Connection, indices: Sequence[int]) -> int:
    config = life.config
    page_s = life.faults.transfer_delay_s + config.page_bytes / config.transfer_bytes_per_s / config.speed_up
    if config.verify_kv:
        for index in indices:
            await life.clock.sleep(page_s)
            await connection.send(Page(index, leg.kv.page(index)), damaged=life.faults.damages_next_page())
    else:
        async for pages in paced(life.clock, len(indices), page_s, config.stalled_transport_s):
            await connection.send(Held(pages))
    await connection.send(PagesEnd(leg.first_token))
    return len(indices) * config.page_bytes


def _pages(life: Life, leg: PrefillLeg) -> int:
    return life.config.pages(len(leg.job.tokens))
