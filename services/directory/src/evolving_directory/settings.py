"""Settings of the directory."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from evolving.core.config import DecodeToPrefill, DirectoryConfig
from evolving.runtime.settings import ServiceSettings


class DirectorySettings(ServiceSettings):
    """Where the KV blocks of a cluster are, and how many branches need them there."""

    service: ClassVar[str] = "directory"

    data_dir: Path | None = Field(
        None,
        description="directory of files in which branches and their counts survive a restart, this process's alone; "
        "without it they are in memory only, and a restart forgets branches until their next request",
    )
    journal_segment_bytes: int = Field(
        64 << 20,
        ge=4096,
        le=1 << 30,
        description="size of one file of the journal; once closed files outgrow it and the last snapshot, they are "
        "turned into a new snapshot, bytes",
    )
    idle_ttl_s: float = Field(
        24 * 3600.0,
        gt=0,
        description="a branch without a running request or a live descendant ends after this long, seconds; its next "
        "request revives it",
    )
    tombstone_s: float = Field(
        24 * 3600.0, gt=0, description="the id of a branch its harness ended stays refused for this long, seconds"
    )
    request_ttl_s: float = Field(
        3600.0,
        gt=0,
        description="a running request that nothing was heard of for this long counts as over, seconds",
    )
    decode_to_prefill: DecodeToPrefill = Field(
        DecodeToPrefill.KEEP,
        description="what a node does that turns from decode to prefill; keep: what branches need stays in its host "
        "memory, counted for prefill; reset: it is emptied and counts nothing, the rule of the paper",
    )
    count_delay_s: float = Field(
        0.02, ge=0, le=1, description="counts for a node are gathered for this long before they are sent, seconds"
    )
    node_backlog_blocks: int = Field(
        4_000_000,
        ge=1000,
        description="counts that may wait for a node which doesn't read, in blocks; beyond, its stream is cut and it "
        "gets everything anew once it is back",
    )
    audit_timeout_s: float = Field(
        10.0, gt=0, le=600, description="longest an audit waits for the counts nodes evict by, seconds"
    )

    @property
    def config(self) -> DirectoryConfig:
        """The core's part."""
        return DirectoryConfig(
            idle_ttl_s=self.idle_ttl_s,
            tombstone_s=self.tombstone_s,
            request_ttl_s=self.request_ttl_s,
            decode_to_prefill=self.decode_to_prefill,
        )
