"""What the legs of an attempt ask their nodes for."""

from __future__ import annotations

import secrets

from evolving.core.blocks import TOKEN_BYTES
from evolving.internal.v1 import node_agent_pb2
from evolving_gateway.plan import Job, Plan
from evolving_gateway.token_ids import to_wire


class LegRequests:
    """Of one attempt: its legs share the context and the transfer between them."""

    def __init__(self, job: Job, plan: Plan) -> None:
        self._job = job
        self._plan = plan
        self._transfer_id = secrets.randbits(63)
        self._tokens = job.prompt + to_wire(plan.generated)

    @property
    def context_tokens(self) -> int:
        """The prompt and the output of earlier attempts."""
        return len(self._tokens) // TOKEN_BYTES

    def prefill(self, leg_id: str, epoch: int) -> node_agent_pb2.PrefillRequest:
        """For the prefill leg."""
        job, plan = self._job, self._plan
        return node_agent_pb2.PrefillRequest(
            partition_id=job.partition_id,
            tenant=job.tenant,
            request_id=job.request_id,
            leg_id=leg_id,
            transfer_id=self._transfer_id,
            token_ids=self._tokens,
            generated_tokens=len(plan.generated),
            root=job.root,
            sampling=job.sampling,
            priority=job.priority,
            quoted_wait_s=plan.score.wait_s,
            may_requote=plan.may_requote,
            holders=plan.holders,
            branch_id=job.branch_id,
            version=job.version,
            epoch=epoch,
            expected_cached_tokens=plan.score.cached_tokens,
        )

    def decode(self, leg_id: str, epoch: int) -> node_agent_pb2.DecodeRequest:
        """For a decode leg."""
        job, plan = self._job, self._plan
        return node_agent_pb2.DecodeRequest(
            partition_id=job.partition_id,
            tenant=job.tenant,
            request_id=job.request_id,
            leg_id=leg_id,
            transfer_id=self._transfer_id,
            token_ids=self._tokens,
            generated_tokens=len(plan.generated),
            root=job.root,
            sampling=job.sampling,
            source_node_id=plan.node.node_id,
            source_address=plan.node.registration.transfer_address,
            branch_id=job.branch_id,
            version=job.version,
            epoch=epoch,
            reserve_deadline_s=min(job.reserve_deadline_s, plan.timeout_s),
        )
