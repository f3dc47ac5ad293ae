"""A whole service in one screen, for tests that need a real process. Says "cleaned up" when its main unwinds."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import grpc
from google.protobuf.wrappers_pb2 import StringValue
from pydantic import Field

from evolving.runtime.service import Service, run_service
from evolving.runtime.settings import ServiceSettings
from evolving.runtime.settings_loader import load


class TinySettings(ServiceSettings):
    """Serve a method that waits."""

    service: ClassVar[str] = "tiny"
    needs_etcd: bool = Field(False, description="whether it begins to serve only once etcd answers")
    fail_loop: bool = Field(False, description="whether its loop fails at once")
    stuck: bool = Field(False, description="whether it never gets as far as serving")
    stubborn: bool = Field(False, description="whether its clean-up never ends")
    killed_file: Path | None = Field(None, description="written when it is killed, instead of drained")


class Tiny:
    """Wait(n): n pieces, each when the file named in the request's text exists; for ever where it never does."""

    async def Wait(self, request: StringValue, context: Any) -> AsyncIterator[StringValue]:
        yield StringValue(value="started")
        while not Path(request.value).exists():
            await asyncio.sleep(0.02)
        yield StringValue(value="finished")


def register(tiny: Tiny, server: Any) -> None:
    handler = grpc.unary_stream_rpc_method_handler(
        tiny.Wait,
        request_deserializer=StringValue.FromString,
        response_serializer=StringValue.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Tiny", {"Wait": handler}),))


async def follow(store: Any) -> None:
    async for _ in store.watch("/"):
        pass


async def fail() -> None:
    raise RuntimeError("the loop broke")


async def serve(service: Service[TinySettings]) -> None:
    settings = service.settings
    if settings.killed_file is not None:
        service.on_kill(settings.killed_file.touch)
    service.server.add(register, Tiny(), "test.Tiny")
    try:
        if settings.needs_etcd:
            async with service.open_store() as store:
                await service.start()
                service.spawn(follow(store), "watch")
                service.register(store, "/tiny", service.address.encode())
                await service.serve()
        else:
            await service.start()
            if settings.stuck:
                await asyncio.Event().wait()
            if settings.fail_loop:
                service.spawn(fail(), "fail")
            await service.serve()
    finally:
        if settings.stubborn:
            await asyncio.Event().wait()
        print("cleaned up", flush=True)


if __name__ == "__main__":
    sys.exit(run_service(load(TinySettings, prog="tiny"), serve))
