"""Evolving Infra's asyncio client: branches, streaming generations that survive a gateway, typed errors."""

from evolving_client.branch import Branch
from evolving_client.client import Client
from evolving_client.context import Message, Prompt
from evolving_client.errors import (
    BranchEnded,
    DeadlineExceeded,
    EvolvingError,
    InvalidRequest,
    Overloaded,
    ProtocolError,
    Refused,
    RequestConflict,
    StaleVersion,
    Unauthenticated,
    Unavailable,
    UnknownBranch,
    UnknownModel,
)
from evolving_client.events import (
    Cached,
    Event,
    Finished,
    FinishReason,
    LossCause,
    Reuse,
    Started,
    Timings,
    Tokens,
    Usage,
)
from evolving_client.generation import Generation
from evolving_client.options import GenerateOptions
from evolving_client.retry import RetryPolicy

__all__ = [
    "Branch",
    "BranchEnded",
    "Cached",
    "Client",
    "DeadlineExceeded",
    "Event",
    "EvolvingError",
    "FinishReason",
    "Finished",
    "GenerateOptions",
    "Generation",
    "InvalidRequest",
    "LossCause",
    "Message",
    "Overloaded",
    "Prompt",
    "ProtocolError",
    "Refused",
    "RequestConflict",
    "RetryPolicy",
    "Reuse",
    "StaleVersion",
    "Started",
    "Timings",
    "Tokens",
    "Unauthenticated",
    "Unavailable",
    "UnknownBranch",
    "UnknownModel",
    "Usage",
]
