"""Settings every service shares, and how they are read: flags, then environment, then a file, then defaults."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from evolving.runtime.keys import Keys
from evolving.runtime.log import LogFormat, LogLevel

MAX_MESSAGE_BYTES = 32 * 1024 * 1024


class SettingsError(Exception):
    """Settings that can't work together. `problems`: one line each, saying what is wrong and what to do."""

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port". Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} is not host:port, such as 127.0.0.1:7000")
    if host.startswith("[") and host.endswith("]"):
        host = str(ipaddress.IPv6Address(host[1:-1]))
    elif ":" in host or not re.fullmatch(r"[A-Za-z0-9._-]+", host):
        raise ValueError(f"{address!r} is not host:port; an IPv6 address needs brackets, such as [::1]:7000")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """ "host:port", with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach a server listening on "host:port"."""
    host, _ = split_address(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(address: str) -> bool:
    """Whether "host:port" means every interface of this machine."""
    host, _ = split_address(address)
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _checked_address(address: str) -> str:
    split_address(address)
    return address


Address = Annotated[str, AfterValidator(_checked_address)]  # "host:port"


class ServiceSettings(BaseModel):
    """Base of every service's settings. Subclasses set `service` and add fields, each with a description and its unit.

    Constructing one directly reads neither environment nor files; `settings_loader.load` does.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
    service: ClassVar[str] = "service"

    listen: Address = Field("127.0.0.1:0", description="host:port the gRPC server binds; port 0 takes a free one")
    advertise: Address | Literal[""] = Field(
        "", description="host:port others reach this service by; empty: the address it listens on"
    )
    metrics_listen: Address | Literal[""] = Field(
        "127.0.0.1:0", description="host:port of HTTP /metrics, /healthz, /readyz; empty: none"
    )
    etcd_endpoints: tuple[Address, ...] = Field(
        ("127.0.0.1:2379",), min_length=1, description="etcd members, host:port, comma-separated"
    )
    etcd_prefix: str = Field("/evolving", pattern=r"^/\S*[^/\s]$", description="where this cluster's keys start")
    etcd_timeout_s: float = Field(3.0, gt=0, le=60, description="longest wait for one etcd call, seconds")
    partition_id: str = Field(
        "p0", pattern=r"^[A-Za-z0-9._-]+$", description="the partition of the cluster this instance serves"
    )
    registration_ttl_s: float = Field(
        10.0, ge=1, le=300, description="how long others believe in this instance after it died, seconds"
    )
    log_level: LogLevel = Field("info", description="least severe level that is logged")
    log_format: LogFormat = Field("json", description="one JSON object a line, or console for people")
    grace_s: float = Field(
        20.0, gt=0, le=3600, description="time calls have to finish after SIGTERM before they are cancelled, seconds"
    )
    credentials_file: Path | None = Field(
        None, description="TOML file of accepted bearer tokens (hashed); without it only loopback may be bound"
    )
    token_file: Path | None = Field(
        None, description="file holding the bearer token this service presents to the others; none: calls without"
    )
    max_message_bytes: int = Field(
        MAX_MESSAGE_BYTES, ge=64 * 1024, le=1 << 30, description="largest gRPC message sent or received, bytes"
    )
    max_concurrent_calls: int = Field(
        4096, ge=1, description="calls served at once; more are answered RESOURCE_EXHAUSTED with a retry hint"
    )
    default_deadline_s: float = Field(60.0, gt=0, description="deadline of a unary call whose client set none, seconds")

    @model_validator(mode="before")
    @classmethod
    def _split_lists(cls, values: Any) -> Any:
        """Let flags and environment write a list as "a,b"."""
        if not isinstance(values, dict):
            return values
        return {
            name: [part.strip() for part in value.split(",") if part.strip()]
            if isinstance(value, str) and name in cls.model_fields and _is_list(cls.model_fields[name].annotation)
            else value
            for name, value in values.items()
        }

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.credentials_file is None and not is_loopback(self.listen):
            raise ValueError(
                f"listen: {self.listen} is reachable from other machines but no credentials_file is set; "
                "set one, or listen on 127.0.0.1"
            )
        if not self.advertise and is_wildcard(self.listen):
            raise ValueError(
                f"advertise: must be set because listen is {self.listen}; give the host:port others reach it by"
            )
        return self

    @property
    def keys(self) -> Keys:
        """Where the partition's records lie in etcd."""
        return Keys(self.etcd_prefix, self.partition_id)

    def advertised(self, bound: str) -> str:
        """The address to publish, given the one bound ("host:port" with the real port).

        An advertise port of 0 takes the bound port.
        """
        if not self.advertise:
            return bound
        host, port = split_address(self.advertise)
        return join_address(host, port or split_address(bound)[1])

    def bearer_token(self) -> str | None:
        """The token to present to other services. Raises SettingsError when the file can't be read or is empty."""
        if self.token_file is None:
            return None
        try:
            token = self.token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"--token-file: {self.token_file} can't be read ({error}); give a text file") from error
        if not token:
            raise SettingsError(f"--token-file: {self.token_file} is empty; put the token in it")
        return token


def _is_list(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) in (tuple, list, set, frozenset)
