"""Settings of the planner."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator

from evolving.core.errors import CoreError
from evolving.core.planner import SplitShape
from evolving.runtime.settings import ServiceSettings


class PlannerSettings(ServiceSettings):
    """The split of a cluster: which nodes prefill and which decode."""

    service: ClassVar[str] = "planner"

    initial_split: str = Field(
        "",
        description="shape of the first split, such as 2P1D, written once that many nodes are there; empty: half of "
        "the nodes prefill, rounded up, once there are two",
    )
    leader_ttl_s: float = Field(
        5.0, ge=1, le=60, description="a leader that could not renew for this long has lost its office, seconds"
    )
    decisions_kept: int = Field(
        100, ge=1, le=1000, description="decisions kept in etcd with their reasons, the newest ones"
    )

    @field_validator("initial_split")
    @classmethod
    def _a_shape(cls, text: str) -> str:
        if text:
            try:
                SplitShape.parse(text)
            except CoreError as error:
                raise ValueError(str(error)) from None
        return text

    @property
    def initial_shape(self) -> SplitShape | None:
        """The first split's shape; None: the default."""
        return SplitShape.parse(self.initial_split) if self.initial_split else None
