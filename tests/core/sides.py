"""The directory and the naive model as they stand: all that both can be asked, with the answers compared."""

from __future__ import annotations

from collections.abc import Mapping

from core.model import Model, ModelBranch, Name, split_names
from core.tally import Tally

from evolving.core import directory_types as types
from evolving.core.config import DirectoryConfig
from evolving.core.directory import Directory
from evolving.core.directory_types import Match
from evolving.core.needs import need
from evolving.core.terms import Phase, Tier


class Sides:
    """Both of them, and what the nodes know: the counts each was pushed, the blocks each really holds."""

    def __init__(self, config: DirectoryConfig) -> None:
        self.now_s = 1000.0
        self.core = Directory(config)
        self.model = Model(config)
        self.paths: dict[Name, list[Name]] = {}  # every block that was ever named, with the context it ends
        self.pushed: dict[str, dict[Name, int]] = {}  # node -> counts it evicts by
        self.elsewhere: dict[tuple[str, Name], bool] = {}  # by node: whether the pool has it without that node's copy
        self.heard: dict[str, set[Name]] = {}  # node in a resync -> blocks whose count it heard of since

    def needs(self) -> dict[str, dict[Name, int]]:
        """What each node evicts by: nonzero needs by name."""
        return {
            node_id: {name: need(count, self.elsewhere[node_id, name]) for name, count in pushed.items() if count}
            for node_id, pushed in self.pushed.items()
        }

    def compare(self) -> None:
        """Everything both can be asked, except matches."""
        self.core.check_invariants()
        tally = Tally.of(self.model)
        self._compare_counts(tally)
        stats = self.core.stats()
        live = self.model.live_branches()
        assert stats.live_branches == len(live)
        assert stats.tombstones == len(self.model.branches) - len(live)
        for counter in ("begins", "side_requests", "unannounced_rewrites", "unknown_parents", "revived"):
            assert stats.counters.get(counter, 0) == self.model.counters[counter], counter
        views = self.core.branches(self.now_s, limit=1000, include_ended=True)
        assert [(view.tenant, view.branch_id) for view in views] == sorted(self.model.branches)
        for view in views:
            branch = self.model.branches[view.tenant, view.branch_id]
            assert (view.version, view.state) == (branch.version, branch.state)
            assert view.parent_branch_id == branch.parent_branch_id
            assert view.idle_s == self.now_s - branch.heard_s
            if branch.state is types.BranchState.LIVE:
                self._compare_branch(view, branch, tally)

    def _compare_counts(self, tally: Tally) -> None:
        assert {node.node_id for node in self.core.stats().nodes} == set(self.model.nodes)
        for stats in self.core.stats().nodes:
            node = self.model.nodes[stats.node_id]
            mine = tally.on(stats.node_id)
            kept = {name: count for names, count in self.core.node_counts(stats.node_id) for name in split_names(names)}
            assert kept == mine
            assert stats.held_blocks == len(mine)
            assert (stats.l1_blocks, stats.l2_blocks) == (len(node.held[Tier.L1]), len(node.held[Tier.L2]))
            assert stats.incarnation == node.incarnation
            assert stats.resyncing == (node.lost or node.in_snapshot)
            if not node.lost and not node.in_snapshot:
                assert stats.last_event_sequence == node.sequence
            if stats.node_id not in self.heard:
                assert {name: count for name, count in self.pushed[stats.node_id].items() if count} == mine
                self._compare_elsewhere(stats.node_id, mine)
        settled = {node_id: needs for node_id, needs in self.needs().items() if node_id not in self.heard}
        report = self.core.audit(settled)
        assert (report.compared, report.mismatch_count, report.mismatches) == (len(tally.prefill | tally.decode), 0, ())
        assert report.nonzero_after_end == 0
        pool = self.core.pool_counts()
        assert (pool.held_blocks, pool.shared_blocks, pool.zero_blocks) == tally.held_shared_zero(tally.kept)

    def _compare_elsewhere(self, node_id: str, counts: Mapping[Name, int]) -> None:
        """What a node was told of other nodes' copies is so, once those of nodes that went are swept."""
        wakeup_s = self.core.next_wakeup_s()
        if wakeup_s is None or wakeup_s > self.now_s:
            for name in counts:
                assert self.elsewhere[node_id, name] == bool(self.model.holders(name, Tier.L2) - {node_id}), name

    def _compare_branch(self, view: types.BranchView, branch: ModelBranch, tally: Tally) -> None:
        assert view.prompt_blocks == len(branch.prompt)
        assert view.prompt_blocks + view.output_blocks == len(branch.context)
        assert view.running_requests == len(branch.running())
        assert view.unannounced_rewrites == branch.unannounced_rewrites
        homes: dict[Phase, dict[Name, str]] = {phase: {} for phase in Phase}
        for home in view.homes:
            for name in branch.context[home.first_block : home.first_block + home.blocks]:
                assert name not in homes[home.phase]
                homes[home.phase][name] = home.node_id
        assert homes == branch.homes
        assert [home.phase for home in view.homes] == sorted(home.phase for home in view.homes)
        expected = tally.held_shared_zero(branch.context)
        for counts in (view.counts, self.core.context_counts(*branch.key)):
            assert (counts.held_blocks, counts.shared_blocks, counts.zero_blocks) == expected
        children = {key[1] for key, parent in self.model.lineage.items() if parent == branch.key}
        live_children = {child for child in children if self.model.live(branch.key[0], child) is not None}
        assert set(view.child_branch_ids) == live_children
        assert len(view.child_branch_ids) == len(live_children)

    def match(self, names: list[Name]) -> None:
        """Where the blocks of any context are."""
        self.compare_match(self.core.match(self.now_s, b"".join(names)), names)

    def compare_match(self, match: Match, names: list[Name]) -> None:
        """What the directory said of where the blocks of a context are."""
        model = self.model
        assert match.blocks == len(names)
        assert match.pool_blocks == model.pool_depth(names, Tier.L2)
        assert match.any_blocks == model.pool_depth(names, None)
        depths = {node: (depth.l1_blocks, depth.l2_blocks, depth.either_blocks) for node, depth in match.nodes.items()}
        expected = {
            node: tuple(model.depth(names, node, tier) for tier in (Tier.L1, Tier.L2, None)) for node in model.nodes
        }
        assert depths == {node: depth for node, depth in expected.items() if depth[2] > 0}
        at = 0
        for run in match.holders:
            assert run.first_block == at
            assert run.blocks > 0
            for name in names[at : at + run.blocks]:
                assert frozenset(run.l1_nodes) == model.holders(name, Tier.L1)
                assert frozenset(run.l2_nodes) == model.holders(name, Tier.L2)
            at += run.blocks
        assert at <= len(names)
        assert not any(model.holders(name) for name in names[at:])
        assert not match.holders or match.holders[-1].l1_nodes or match.holders[-1].l2_nodes

    def block(self, name: Name) -> None:
        """One block's view."""
        view = self.core.block(name)
        holders = self.model.holders(name)
        branches = self.model.branches_with(name)
        if not holders and not branches:
            assert view is None or (not view.copies and not view.branches)
            return
        assert view is not None
        assert view.depth == len(self.paths[name]) - 1
        assert set(view.branches) == branches
        prefill, decode = self.model.counts(Phase.PREFILL), self.model.counts(Phase.DECODE)
        copies = {copy.node_id: copy for copy in view.copies}
        assert set(copies) == holders
        for node_id, copy in copies.items():
            node = self.model.nodes[node_id]
            assert (copy.in_l1, copy.in_l2) == (name in node.held[Tier.L1], name in node.held[Tier.L2])
            assert (copy.prefill_count, copy.decode_count) == (prefill[node_id, name], decode[node_id, name])
