"""Who may call: bearer tokens, kept as hashes in a file.

The file is TOML, one table a token:

    [[credential]]
    tenant = "team-a"        # whose requests these are
    sha256 = "5e88…"         # printf %s "$TOKEN" | sha256sum
    scope = "client"         # "client": the gateway's public API; "cluster": every method (services, operators)

It is read again when it changes, so tokens are added and withdrawn without a restart; a file that has become
unreadable is reported and the last good one stays in force.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evolving.runtime.clock import Clock
from evolving.runtime.errors import Unauthenticated
from evolving.runtime.log import get_logger
from evolving.runtime.settings import SettingsError

Scope = Literal["client", "cluster"]
DEFAULT_TENANT = "default"
_RELOAD_EVERY_S = 2.0
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a token speaks for."""

    tenant: str
    scope: Scope


class _Credential(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    tenant: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")]
    scope: Scope = "client"


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    credential: tuple[_Credential, ...]


def hash_token(token: str) -> str:
    """What the file holds for a token: the hex SHA-256 of its UTF-8 bytes."""
    return hashlib.sha256(token.encode()).hexdigest()


def new_credential(tenant: str, scope: Scope) -> tuple[str, str]:
    """A fresh random token and the table to add to the file for it."""
    token = secrets.token_urlsafe(32)
    table = f'[[credential]]\ntenant = "{tenant}"\nsha256 = "{hash_token(token)}"\nscope = "{scope}"\n'
    return token, table


class Credentials:
    """The tokens in force. Without a file every caller is tenant "default" with cluster scope."""

    def __init__(self, path: Path | None, clock: Clock) -> None:
        """Read the file. Raises SettingsError with a line for each thing wrong in it."""
        self._path = path
        self._clock = clock
        self._checked_s = clock.now_s()
        self._stamp = _stamp(path) if path else None
        self._callers = _read(path) if path else ()

    @property
    def open(self) -> bool:
        """Whether no tokens are configured (loopback only, see ServiceSettings)."""
        return self._path is None

    def caller(self, authorization: str | None) -> Caller:
        """Who sent the metadata value "Bearer <token>". Raises Unauthenticated."""
        if self._path is None:
            return Caller(DEFAULT_TENANT, "cluster")
        self._reload_if_changed(self._path)
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise Unauthenticated("this server needs a token: send metadata authorization: Bearer <token>")
        digest = hashlib.sha256(token.strip().encode(errors="surrogateescape")).digest()
        found: Caller | None = None
        for known, caller in self._callers:  # every entry is compared, so time tells nothing about which one matched
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None:
            raise Unauthenticated("this token is not known here")
        return found

    def _reload_if_changed(self, path: Path) -> None:
        now_s = self._clock.now_s()
        if now_s - self._checked_s < _RELOAD_EVERY_S:
            return
        self._checked_s = now_s
        stamp = _stamp(path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._callers = _read(path)
        except SettingsError as error:
            _log.error("credentials_not_reloaded", path=str(path), problems=error.problems)
        else:
            _log.info("credentials_reloaded", path=str(path), count=len(self._callers))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(path: Path) -> tuple[tuple[bytes, Caller], ...]:
    try:
        parsed = _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--credentials-file: {path} can't be read ({error}); give a readable file") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"--credentials-file: {path} is not valid TOML ({error}); correct it") from error
    except ValidationError as error:
        raise SettingsError(
            *(
                f"--credentials-file: {path}: {'.'.join(map(str, item['loc']))}: {item['msg']}"
                for item in error.errors(include_url=False, include_input=False)
            )
        ) from error
    return tuple((bytes.fromhex(c.sha256), Caller(c.tenant, c.scope)) for c in parsed.credential)
