"""The directory's metrics."""

from __future__ import annotations

from evolving.core.directory_types import Stats
from evolving.runtime.metrics import Metrics

# Seconds: a match takes microseconds.
_FINE_BUCKETS_S = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.1, 1.0)


class DirectoryMetrics:
    """Registered once per process."""

    def __init__(self, metrics: Metrics) -> None:
        self.begin_seconds = metrics.histogram(
            "directory_begin_seconds", "Time to record a context and match it.", buckets=_FINE_BUCKETS_S
        )
        self.match_seconds = metrics.histogram(
            "directory_match_seconds", "Time to match a context without a branch.", buckets=_FINE_BUCKETS_S
        )
        self.resyncs = metrics.counter("directory_resyncs", "Snapshots asked of nodes.")
        self.cut_streams = metrics.counter("directory_cut_streams", "Node streams ended by the directory.", ("reason",))
        self.ended_branches = metrics.counter("directory_ended_branches", "Branches that ended.", ("by",))
        self.ignored = metrics.counter("directory_ignored_events", "Events that changed nothing.", ("kind",))
        self.journal_seconds = metrics.histogram(
            "directory_journal_seconds",
            "Time to write and sync what gathered for the journal.",
            buckets=_FINE_BUCKETS_S,
        )
        self.journal_bytes = metrics.counter("directory_journal_bytes", "Bytes written to the journal.")
        self.journal_failures = metrics.counter("directory_journal_failures", "Times the journal's disk failed.")
        self._term = metrics.gauge("directory_term", "Term of this directory.")
        self._branches = metrics.gauge("directory_live_branches", "Branches that are alive.")
        self._tombstones = metrics.gauge("directory_tombstones", "Ended branches whose id is still refused.")
        self._blocks = metrics.gauge("directory_blocks", "Distinct blocks with a copy or a branch.")
        self._runs = metrics.gauge("directory_runs", "Runs of the prefix index.")
        self._connected = metrics.gauge("directory_connected_nodes", "Nodes whose stream is open.")
        self._copies = metrics.gauge("directory_copies", "Blocks a node holds.", ("node", "tier"))
        self._held = metrics.gauge("directory_held_blocks", "Blocks on a node that a branch counts.", ("node",))
        self._nodes: set[str] = set()

    def saw(self, stats: Stats, term: int, connected: int) -> None:
        """Sizes as they are now."""
        self._term.set(term)
        self._branches.set(stats.live_branches)
        self._tombstones.set(stats.tombstones)
        self._blocks.set(stats.blocks)
        self._runs.set(stats.runs)
        self._connected.set(connected)
        for node in stats.nodes:
            self._copies.labels(node.node_id, "l1").set(node.l1_blocks)
            self._copies.labels(node.node_id, "l2").set(node.l2_blocks)
            self._held.labels(node.node_id).set(node.held_blocks)
        present = {node.node_id for node in stats.nodes}
        for gone in self._nodes - present:
            self._copies.remove(gone, "l1")
            self._copies.remove(gone, "l2")
            self._held.remove(gone)
        self._nodes = present
