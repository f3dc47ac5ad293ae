"""Two ends of a connection prove to each other that they know the cluster's secret, without showing it.

Each side names a nonce and answers with HMAC-SHA256 over both, so a recorded answer is of no use. The side and the
purpose are part of what is signed, so an answer cannot be sent back, or used on another kind of connection. A cluster
without a secret has an empty one: the exchange is the same and proves nothing. What follows on the connection is
neither encrypted nor signed.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import hmac
import secrets

NONCE_BYTES = 32
PROOF_BYTES = 32


class Side(enum.Enum):
    """Which end of a connection."""

    SERVER = b"server"
    CLIENT = b"client"


class Unauthenticated(Exception):
    """The other end does not know this cluster's secret, or went away before it showed that it does."""


def fresh_nonce() -> bytes:
    """A number nobody has seen; NONCE_BYTES."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: bytes, purpose: bytes, side: Side, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """What only this side, knowing the secret, answers to these nonces; PROOF_BYTES."""
    said = b"\0".join((purpose, side.value, server_nonce + client_nonce))
    return hmac.digest(secret, said, hashlib.sha256)


def is_proof(shown: bytes, secret: bytes, purpose: bytes, side: Side, server_nonce: bytes, client_nonce: bytes) -> bool:
    """Whether `shown` is that answer, in a time that does not depend on it."""
    return hmac.compare_digest(shown, proof(secret, purpose, side, server_nonce, client_nonce))


async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, purpose: bytes) -> None:
    """The exchange as the server. Raises Unauthenticated."""
    server_nonce = fresh_nonce()
    writer.write(server_nonce)
    said = await _read(reader, NONCE_BYTES + PROOF_BYTES)
    client_nonce, shown = said[:NONCE_BYTES], said[NONCE_BYTES:]
    if not is_proof(shown, secret, purpose, Side.CLIENT, server_nonce, client_nonce):
        raise Unauthenticated("the other end has another token")
    writer.write(proof(secret, purpose, Side.SERVER, server_nonce, client_nonce))


async def enter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, purpose: bytes) -> None:
    """The exchange as the client. Raises Unauthenticated."""
    server_nonce, client_nonce = await _read(reader, NONCE_BYTES), fresh_nonce()
    writer.write(client_nonce + proof(secret, purpose, Side.CLIENT, server_nonce, client_nonce))
    shown = await _read(reader, PROOF_BYTES)
    if not is_proof(shown, secret, purpose, Side.SERVER, server_nonce, client_nonce):
        raise Unauthenticated("the other end has another token")


async def _read(reader: asyncio.StreamReader, size: int) -> bytes:
    try:
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise Unauthenticated("the other end hung up: is its token the same?") from error
