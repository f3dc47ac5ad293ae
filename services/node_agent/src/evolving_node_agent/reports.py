"""What a leg tells the rest of the cluster when it gets somewhere."""

from __future__ import annotations

from dataclasses import dataclass

from evolving.core.terms import Phase
from evolving.internal.v1 import directory_pb2
from evolving.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class RequestRef:
    """Which request of which branch."""

    tenant: str
    branch_id: str
    version: int
    request_id: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What the directory knows it by."""
        return (self.tenant, self.branch_id, self.request_id)


def landed(ref: RequestRef, phase: Phase, blocks: int) -> directory_pb2.ConnectNodeRequest:
    """Blocks [0, blocks) of the prompt are here now, for a phase."""
    return directory_pb2.ConnectNodeRequest(
        landed=directory_pb2.Landed(
            tenant=ref.tenant,
            branch_id=ref.branch_id,
            version=ref.version,
            request_id=ref.request_id,
            phase=common_pb2.Phase.ValueType(phase),
            blocks=blocks,
        )
    )


def output(ref: RequestRef, first_block: int, names: bytes) -> directory_pb2.ConnectNodeRequest:
    """Output completed these blocks, 16 bytes each."""
    return directory_pb2.ConnectNodeRequest(
        output=directory_pb2.Output(
            tenant=ref.tenant,
            branch_id=ref.branch_id,
            version=ref.version,
            request_id=ref.request_id,
            first_block=first_block,
            names=names,
        )
    )


def done(ref: RequestRef) -> directory_pb2.ConnectNodeRequest:
    """The request has its whole output."""
    return directory_pb2.ConnectNodeRequest(
        done=directory_pb2.RequestDone(tenant=ref.tenant, branch_id=ref.branch_id, request_id=ref.request_id)
    )
