"""Expected failures of the node agent, with their gRPC statuses."""

from __future__ import annotations

import grpc

from evolving.runtime.errors import InvalidRequest, Overloaded, ServiceError
from evolving_node_agent.engines import port


class QueueFull(Overloaded):
    """Too many prefill legs wait here."""

    reason = "QUEUE_FULL"


class EngineIsDown(ServiceError):
    """The engine crashed, is starting or stopping; its legs are lost."""

    reason = "ENGINE_DOWN"
    status = grpc.StatusCode.UNAVAILABLE


class NoDecodeRoom(ServiceError):
    """No decode slot or KV room within the deadline."""

    reason = "NO_ROOM"
    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class PrefillLegLost(ServiceError):
    """The prefill leg, or its node, went away before its KV was here."""

    reason = "SOURCE_LOST"
    status = grpc.StatusCode.UNAVAILABLE


class DecodeLegLost(ServiceError):
    """The decode leg, or its node, went away, or none came in time."""

    reason = "DECODE_LOST"
    status = grpc.StatusCode.UNAVAILABLE


class LegAborted(ServiceError):
    """Someone aborted this leg."""

    reason = "ABORTED"
    status = grpc.StatusCode.ABORTED


class LegRejected(InvalidRequest):
    """The engine can't do this job, now or later."""

    reason = "REJECTED"


class EngineFailed(ServiceError):
    """The engine could not do it for a reason of its own."""

    reason = "ENGINE_FAILED"
    status = grpc.StatusCode.UNAVAILABLE


_RETRY_S = 0.5


def from_engine(error: port.EngineError) -> ServiceError:
    """What a caller is told of a failure of the engine."""
    match error:
        case port.EngineDown():
            return EngineIsDown(str(error), retry_after_s=_RETRY_S)
        case port.NoRoom():
            return NoDecodeRoom(str(error), retry_after_s=_RETRY_S)
        case port.SourceLost():
            return PrefillLegLost(str(error))
        case port.DecodeLost():
            return DecodeLegLost(str(error))
        case port.Aborted():
            return LegAborted(str(error))
        case port.Rejected():
            return LegRejected(str(error))
        case _:
            return EngineFailed(str(error))
