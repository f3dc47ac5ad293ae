"""Ask every node what it evicts by, and compare."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field

from evolving.core.blocks import split_names
from evolving.core.directory_types import AuditReport
from evolving.core.needs import need
from evolving.core.prefix_index import check_names
from evolving.internal.v1 import directory_pb2
from evolving_directory.host import Host
from evolving_directory.slices import in_turns


@dataclass(slots=True)
class _Query:
    needs: dict[bytes, int] = field(default_factory=dict)
    answered: asyncio.Event = field(default_factory=asyncio.Event)


class CountsQueries:
    """Questions that wait for answers, by (node, query)."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._open: dict[tuple[str, int], _Query] = {}

    def take_reply(self, node_id: str, reply: directory_pb2.CountsReply) -> None:
        """Part of an answer; of a question given up, it is dropped. Raises InvalidArgument."""
        query = self._open.get((node_id, reply.query_id))
        if query is None:
            return
        for blocks in reply.counts:
            check_names(blocks.names)
            if blocks.count:
                query.needs |= dict.fromkeys(split_names(blocks.names), need(blocks.count, blocks.elsewhere))
        if reply.last:
            query.answered.set()

    async def ask(self, host: Host, timeout_s: float) -> dict[str, dict[bytes, int]]:
        """Nonzero needs by name of each node that answered in time.

        The question goes out behind the counts that wait, so an answer includes all of them.
        """
        query_id = next(self._ids)
        asked = {node_id: _Query() for node_id in host.connected}
        for node_id, query in asked.items():
            self._open[node_id, query_id] = query
            host.outboxes[node_id].query_counts(query_id)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(query.answered.wait() for query in asked.values()))
        except TimeoutError:
            pass  # who has not answered by now is reported as unreachable
        finally:
            for node_id in asked:
                del self._open[node_id, query_id]
        return {node_id: query.needs for node_id, query in asked.items() if query.answered.is_set()}


async def audit(host: Host, queries: CountsQueries, timeout_s: float) -> tuple[AuditReport, list[str]]:
    """The comparison, and the nodes that could not be asked."""
    with host.directory.visit() as visit:  # what changes from here on is left out
        answers = await queries.ask(host, timeout_s)
        known = {node: needs for node, needs in answers.items() if node in host.known_nodes}
        report = await in_turns(host.directory.audit_in_parts(visit, known))
    return report, sorted(set(host.known_nodes) - answers.keys())
