"""`python -m evolving.runtime.healthcheck HOST:PORT`: exit status 0 when the service there is SERVING.

For container health checks. 1: it answers something else, or nothing in time; 2: not an address.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from evolving.runtime.settings import split_address

_TIMEOUT_S = 3.0


def main(argv: Sequence[str]) -> int:
    """Check one address; the exit status."""
    try:
        (address,) = argv
        split_address(address)
    except ValueError as error:
        print(f"usage: python -m evolving.runtime.healthcheck HOST:PORT ({error})", file=sys.stderr)
        return 2
    with grpc.insecure_channel(address) as channel:
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)  # its methods come at run time
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            print(f"{address}: {error.code().name}", file=sys.stderr)
            return 1
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    print(f"{address}: {status}")
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
