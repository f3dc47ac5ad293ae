"""Prompts in queues get what peers have in host memory: from one holder after the other (§4.1, §4.4).

What is not there any more when it is read, or was evicted meanwhile, is computed instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from evolving.core.terms import Tier
from evolving_sim.legs import PrefillLeg
from evolving_sim.links import Links
from evolving_sim.sim_node import SimNode


@dataclass(slots=True, eq=False, repr=False)
class Fetching:
    """All reads of peers' host memory."""

    nodes: Mapping[str, SimNode]
    links: Links

    def begin(self, leg: PrefillLeg) -> None:
        """Fetch for a prompt in a queue; its node hears of what comes, and when that was all."""
        leg.fetch_begun = True
        self._read(leg, 0)

    def stop(self, leg: PrefillLeg) -> None:
        """The prompt leaves the queue."""
        if leg.transfer is not None:
            self.links.cancel(leg.transfer)
            leg.transfer = None

    def holder_lost(self, node_id: str) -> None:
        """A node is gone: who read from it goes on with the next holder."""
        for node in self.nodes.values():
            for leg in list(node.queue):
                if leg.transfer is not None and leg.transfer.source == node_id:
                    self.stop(leg)
                    self._read(leg, 0)

    def _read(self, leg: PrefillLeg, first_hint: int) -> None:
        node, names = self.nodes[leg.node_id], leg.kv.names
        for number in range(first_hint, len(leg.hints)):
            hint = leg.hints[number]
            last = min(hint.first_block + hint.blocks, leg.fetch_until_blocks)
            held = node.kv.pool.held(names, last)
            if held < hint.first_block:
                break  # nobody brings what comes before
            holder = self.nodes[hint.node_id]
            if held == last or not holder.alive:
                continue
            reach = holder.kv.pool.matched(names, last, Tier.L2)
            if reach > held:
                size_bytes = (reach - held) * node.config.block_tokens * node.config.kv_bytes_per_token
                arrived = partial(self._arrived, leg, number, held, reach)
                leg.transfer = self.links.send(holder.node_id, node.node_id, size_bytes, arrived)
                return
        node.fetched(leg)

    def _arrived(self, leg: PrefillLeg, number: int, held: int, reach: int) -> None:
        if leg.gone:
            return
        leg.transfer = None
        node, holder, names = self.nodes[leg.node_id], self.nodes[leg.hints[number].node_id], leg.kv.names
        reach = holder.kv.pool.matched(names, reach, Tier.L2)
        if reach > held:
            stored = node.kv.pool.store(names, held, reach)
            leg.fetched_blocks += max(0, stored - held)
            node.came(leg, stored)
        self._read(leg, number + 1)
