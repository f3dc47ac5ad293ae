"""From what this gateway knows of the nodes to the core's decision, for one request."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from evolving.core.candidates import NodeView
from evolving.core.config import FetchRule
from evolving.core.decode_routing import DecodeDecision, DecodeNode, choose_decode
from evolving.core.holders import HeldRun, fetchable_blocks, holder_hints, spare_share
from evolving.core.routing import (
    Context,
    PrefillDecision,
    PrefillScore,
    RoutingConfig,
    choose_prefill,
    deciding_terms,
)
from evolving.internal.v1 import directory_pb2, node_agent_pb2
from evolving_gateway.errors import InvalidModelChoice, NoNode, UnknownModel
from evolving_gateway.metrics import GatewayMetrics
from evolving_gateway.node import Node
from evolving_gateway.nodes import Cluster

NOWHERE = directory_pb2.Match()
"""The match of a request nobody looked up: no copies anywhere."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What requests to a model must keep to. Nodes of one model that may exchange KV share all of it."""

    model: str
    kv_format: str
    block_tokens: int
    vocabulary_tokens: int
    max_prompt_tokens: int
    max_context_tokens: int


class Router:
    """Chooses nodes of a cluster."""

    def __init__(self, cluster: Cluster, config: RoutingConfig, metrics: GatewayMetrics) -> None:
        self._cluster = cluster
        self._config = config
        self._metrics = metrics

    def models(self) -> dict[ModelFacts, list[Node]]:
        """Registered nodes by what they serve. Limits that differ within a model are the least of its nodes'."""
        groups: dict[tuple[str, str, int, int], list[Node]] = {}
        for node in self._cluster.nodes.values():
            facts = node.registration
            key = (facts.model, facts.kv_format, facts.block_tokens, facts.vocab_size)
            groups.setdefault(key, []).append(node)
        return {
            ModelFacts(
                *key,
                max_prompt_tokens=min(node.registration.max_prompt_tokens for node in nodes),
                max_context_tokens=min(node.registration.max_context_tokens for node in nodes),
            ): nodes
            for key, nodes in groups.items()
        }

    def model(self, name: str) -> ModelFacts:
        """Facts of a model; of the only one when `name` is empty. With several KV layouts, those most nodes have.

        Raises UnknownModel, InvalidModelChoice when a name is needed, NoNode when nothing is served at all.
        """
        models = self.models()
        if not models:
            raise NoNode("no node is registered", retry_after_s=1.0)
        named = sorted({facts.model for facts in models})
        if not name and len(named) > 1:
            raise InvalidModelChoice(f"several models are served, name one of: {', '.join(named)}")
        wanted = name or named[0]
        fitting = [facts for facts in models if facts.model == wanted]
        if not fitting:
            raise UnknownModel(f"no node serves {wanted!r}; served: {', '.join(named)}")
        return max(fitting, key=lambda facts: (len(models[facts]), facts.kv_format))

    def serving(self, model: ModelFacts, among: Collection[str] | None = None) -> Iterator[Node]:
        """The nodes of a model that may exchange KV, whatever their state. among: these ids alone; None: all."""
        nodes = self._cluster.nodes
        for node in nodes.values() if among is None else (nodes[node_id] for node_id in among):
            if node.registration.model == model.model and node.registration.kv_format == model.kv_format:
                yield node

    def prefill(
        self, model: ModelFacts, context: Context, match: directory_pb2.Match, excluded: Mapping[str, str]
    ) -> PrefillDecision:
        """Equation 7 over the nodes of a model. `excluded` says per node why the request must not go there."""
        runs = self._readable(match)
        nodes = (view for _, view in self._views(model, match, runs, excluded))
        decision = choose_prefill(_with_spares(context, runs), nodes, self._config)
        self._metrics.chosen(decision.chosen is not None, deciding_terms(decision, self._config))
        return decision

    def prefill_at(
        self,
        model: ModelFacts,
        context: Context,
        match: directory_pb2.Match,
        excluded: Mapping[str, str],
        among: Collection[str],
    ) -> PrefillDecision:
        """As `prefill`, over these nodes alone, and counted as no choice: the request may stay where it waits."""
        runs = self._readable(match)
        nodes = (view for _, view in self._views(model, match, runs, excluded, among))
        return choose_prefill(_with_spares(context, runs), nodes, self._config)

    def decode(
        self,
        model: ModelFacts,
        context: Context,
        match: directory_pb2.Match,
        prefill_node_id: str,
        excluded: Mapping[str, str],
        among: Collection[str] | None = None,
    ) -> DecodeDecision:
        """The decode node of a context that was prefilled on `prefill_node_id`. among: one of these; None: of all."""
        runs = self._readable(match)
        rate = self._fetch_tokens_per_s(model)
        nodes = (
            DecodeNode(
                replace(view, fetch_tokens_per_s=view.fetch_tokens_per_s or rate),
                node.slots_free,
                node.decoding,
                node.decode_context_tokens,
                node.decode_memory_tokens,
                node.decode_coefficients,
                prefilled_here=node.node_id == prefill_node_id,
            )
            for node, view in self._views(model, match, runs, excluded, among)
        )
        return choose_decode(_with_spares(context, runs), nodes, self._config)

    def holders(self, match: directory_pb2.Match, score: PrefillScore, own_blocks: int) -> list[node_agent_pb2.Holder]:
        """Whom the chosen node fetches the blocks it lacks from, and those it may have lost when the request comes."""
        if self._config.fetch is FetchRule.NEVER:
            return []
        load_s = {node.node_id: node.wait_s for node in self._cluster.nodes.values() if node.ready}
        end_block = own_blocks + score.fetched_blocks
        hints = holder_hints(self._readable(match), score.node_id, own_blocks, end_block, load_s)
        return [
            node_agent_pb2.Holder(
                node_id=hint.node_id,
                pool_address=self._cluster.nodes[hint.node_id].registration.pool_address,
                incarnation=self._cluster.nodes[hint.node_id].registration.incarnation,
                first_block=hint.first_block,
                blocks=hint.blocks,
            )
            for hint in hints
        ]

    def _views(
        self,
        model: ModelFacts,
        match: directory_pb2.Match,
        runs: Sequence[HeldRun],
        excluded: Mapping[str, str],
        among: Collection[str] | None = None,
    ) -> Iterator[tuple[Node, NodeView]]:
        """The nodes of a model, and what is known of each and of what it holds of the context that `match` is of."""
        depths = {depth.node_id: depth for depth in match.nodes}
        for node in self.serving(model, among):
            depth = depths.get(node.node_id, directory_pb2.NodeMatch())
            yield (
                node,
                NodeView(
                    node.node_id,
                    self._cluster.role(node),
                    node.ready,
                    node.wait_s,
                    node.new_tokens_per_iteration,
                    node.prefill_coefficients,
                    node.registration.kv_bytes_per_token,
                    unacknowledged=node.unacknowledged,
                    l1_blocks=depth.l1_blocks,
                    any_blocks=depth.any_blocks,
                    fetchable_blocks=fetchable_blocks(runs, node.node_id, depth.any_blocks),
                    fetch_tokens_per_s=node.status.fetch_tokens_per_s,
                    fetch_backlog_tokens=node.fetch_backlog_tokens,
                    room_tokens=node.room_tokens,
                    excluded=excluded.get(node.node_id, ""),
                ),
            )

    def _fetch_tokens_per_s(self, model: ModelFacts) -> float:
        """What reads bring where a node of the model has measured it, the mean; 0: none has. Decode nodes read
        nothing."""
        rates = [node.status.fetch_tokens_per_s for node in self.serving(model) if node.ready]
        known = [rate for rate in rates if rate > 0]
        return sum(known) / len(known) if known else 0.0

    def _readable(self, match: directory_pb2.Match) -> list[HeldRun]:
        """Who holds which blocks, as far as they can be read now."""
        nodes = self._cluster.nodes
        named = {node_id for run in match.holders for node_id in run.node_ids}
        live = {node_id for node_id in named if node_id in nodes and nodes[node_id].ready}
        return [
            HeldRun(run.first_block, run.blocks, tuple(node_id for node_id in run.node_ids if node_id in live))
            for run in match.holders
        ]


def _with_spares(context: Context, runs: Sequence[HeldRun]) -> Context:
    """With the share of its blocks that lie twice; all, where nobody holds any: nodes evict first what lies twice."""
    return replace(context, spare_share=spare_share(runs) if any(run.node_ids for run in runs) else 1.0)
