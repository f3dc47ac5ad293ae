"""Where a request is prefilled: equation 7 (§4.4). Pure: candidates are scored, then one is picked.

A decision keeps every candidate with its terms, so that a log line or a test can say why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from evolving.core.candidates import BORROWED, NodeView, eligible_ids, tie_key, why_not
from evolving.core.config import FetchRule
from evolving.core.terms import Role
from evolving.core.work import PrefillWork, queue_service_s, tokens_service_s


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """How routing reckons. Out-of-range values raise ValueError."""

    fetch_bytes_per_s: float  # what reads from peers bring to a node that has not said what they do
    fetch_fixed_s: float = 0.001  # a fetch's cost before its first byte, seconds
    fetch: FetchRule = FetchRule.SOONER
    tie_share: float = 0.05  # nodes within this share of the best predicted time tie (paper, section 4.4)
    output_tokens: float = 400.0  # expected of a request; coding agents were recorded with means of 300 to 500

    def __post_init__(self) -> None:
        for name, value in {"fetch_bytes_per_s": self.fetch_bytes_per_s, "output_tokens": self.output_tokens}.items():
            if not math.isfinite(value) or value <= 0:
                raise ValueError(f"{name} must be finite and positive, got {value}")
        for name, value in {"fetch_fixed_s": self.fetch_fixed_s, "tie_share": self.tie_share}.items():
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} must be finite and >= 0, got {value}")


def exceeds_quote(wait_s: float, quoted_wait_s: float, floor_s: float = 0.2, share: float = 0.25) -> bool:
    """Whether a node's true wait is so far above what a gateway reckoned with that the gateway should choose again.

    A wait may exceed its quote by `floor_s` seconds, or by `share` of the quote where that is more.
    """
    return wait_s - quoted_wait_s > max(floor_s, share * quoted_wait_s)


@dataclass(frozen=True, slots=True)
class Context:
    """The prompt to route."""

    request_id: str
    tokens: int  # prompt, and output of earlier attempts
    block_tokens: int
    pool_blocks: int = 0  # leading blocks that have a copy on some node
    spare_share: float = 0.0  # of its held blocks, those on two nodes or more: what is taken to hold of others too
    output_tokens_max: float = math.inf  # most it may still generate

    @property
    def pool_tokens(self) -> int:
        """Tokens that could be reused wherever the request goes; the last is always computed."""
        return min(self.pool_blocks * self.block_tokens, max(0, self.tokens - 1))

    def lacking_tokens(self, held_blocks: int) -> int:
        """Tokens in full blocks after the first `held_blocks`: what a node that holds those has yet to store."""
        return max(0, self.tokens // self.block_tokens - held_blocks) * self.block_tokens


@dataclass(frozen=True, slots=True)
class PrefillScore:
    """One candidate with the terms of equation 7, seconds."""

    node_id: str
    eligible: bool
    reason: str
    wait_s: float = 0.0  # W_n, this gateway's unacknowledged sends added
    fetch_s: float = 0.0  # F_n
    service_s: float = 0.0  # S_n
    duplicate_s: float = 0.0  # dup_n
    cached_tokens: int = 0  # prompt tokens expected to be reused here
    fetched_blocks: int = 0  # of them, blocks to bring from peers, from block any_blocks on
    free_fetch_total_s: float = 0.0  # total_s if fetches took no time
    work: PrefillWork | None = None  # what the service time was reckoned with; None where not eligible

    @property
    def ready_s(self) -> float:
        """max(W_n, F_n): until the request can be taken."""
        return max(self.wait_s, self.fetch_s)

    @property
    def ttft_s(self) -> float:
        """max(W_n, F_n) + S_n: predicted time to first token."""
        return self.ready_s + self.service_s

    @property
    def total_s(self) -> float:
        """T̂_n = max(W_n, F_n) + S_n + dup_n: that, and the later work it causes (equation 7)."""
        return self.ttft_s + self.duplicate_s


@dataclass(frozen=True, slots=True)
class PrefillDecision:
    """The node chosen for prefill; None when no node can take the request."""

    chosen: PrefillScore | None
    candidates: tuple[PrefillScore, ...]
    reason: str


def choose_prefill(context: Context, nodes: Iterable[NodeView], config: RoutingConfig) -> PrefillDecision:
    """Pick the prefill node with the least predicted time to first token and later work (equation 7).

    Nodes of the PREFILL or MIXED role are candidates; where none of them can serve, any other live node that isn't
    draining is. Nodes whose total exceeds the best one's by at most `tie_share` of its time to first token tie: the
    prediction is no better than that. Of these one with room for the context wins, then a hash of request and node, so
    that several gateways with the same picture do not all choose the same node, nor all contexts the one of many full
    nodes that has a block more room: it would evict what was used of late, and others keep what was not.
    """
    nodes = sorted(nodes, key=lambda node: node.node_id)
    serving, borrowed = eligible_ids(nodes, Role.PREFILL)
    scores = tuple(
        score_prefill(context, node, config)
        if node.node_id in serving
        else PrefillScore(node.node_id, False, why_not(node))
        for node in nodes
    )
    eligible = [score for score in scores if score.eligible]
    if not eligible:
        return PrefillDecision(None, scores, "no live node can prefill")
    best = min(eligible, key=lambda score: score.total_s)
    tied = [score for score in eligible if score.total_s <= best.total_s + config.tie_share * best.ttft_s]
    equal = [score for score in tied if score.duplicate_s == 0] or tied
    chosen = min(equal, key=lambda score: tie_key(context.request_id, score.node_id))
    reason = "least predicted time to first token"
    if len(equal) > 1:
        reason = f"hash among {len(equal)} that tie"
    elif len(tied) > 1:
        reason = f"has room among {len(tied)} that tie"
    return PrefillDecision(chosen, scores, reason + (BORROWED if borrowed else ""))


_OTHER_TOTALS: dict[str, Callable[[PrefillScore], float]] = {
    "fetch": lambda score: score.free_fetch_total_s,
    "duplicate": lambda score: score.ttft_s,
    "all_but_wait": lambda score: score.wait_s,
}


def deciding_terms(decision: PrefillDecision, config: RoutingConfig) -> tuple[str, ...]:
    """What of equation 7 the choice hung on: "fetch", "duplicate", "all_but_wait".

    Without it the chosen node would not have been among those that tie for the best.
    """
    chosen = decision.chosen
    if chosen is None:
        return ()
    eligible = [score for score in decision.candidates if score.eligible]
    return tuple(
        name
        for name, total_s in _OTHER_TOTALS.items()
        if total_s(chosen) > (1.0 + config.tie_share) * min(map(total_s, eligible))
    )


def score_prefill(context: Context, node: NodeView, config: RoutingConfig) -> PrefillScore:
    """The terms of equation 7 for one node, with the fetch from peers that makes it soonest.

    That is none, all that peers can bring, or as much as comes while the request waits anyway, to the block. Nothing
    else is sooner: up to the wait more fetched is less to compute at no cost; beyond it each token costs the same to
    fetch, and saves more the later it stands in the context.
    """
    unacknowledged_s = queue_service_s(node.unacknowledged, node.coefficients, node.new_tokens_per_iteration)
    wait_s = node.wait_s + unacknowledged_s
    duplicates_cost_s = duplicate_s(context, node, config)
    least_s, fetched_blocks, fetching_s, serving_s = math.inf, 0, 0.0, 0.0
    work_s = 0.0  # at last of all that can be fetched
    for blocks in sorted(_fetch_choices(context, node, wait_s, config)):
        cached, restored = _reused_tokens(context, node, blocks)
        reading_s = fetch_s(blocks * context.block_tokens, node, config)
        work_s = tokens_service_s(
            context.tokens - cached, cached, restored, node.coefficients, node.new_tokens_per_iteration
        )
        total_s = max(wait_s, reading_s) + work_s + duplicates_cost_s
        if total_s < least_s:
            least_s, fetched_blocks, fetching_s, serving_s = total_s, blocks, reading_s, work_s
    cached, restored = _reused_tokens(context, node, fetched_blocks)
    return PrefillScore(
        node.node_id,
        True,
        "fetches from peers" if fetched_blocks else "own copies",
        wait_s=wait_s,
        fetch_s=fetching_s,
        service_s=serving_s,
        duplicate_s=duplicates_cost_s,
        cached_tokens=cached,
        fetched_blocks=fetched_blocks,
        free_fetch_total_s=wait_s + work_s + duplicates_cost_s,
        work=PrefillWork(context.tokens - cached, cached, restored),
    )


def _fetch_choices(context: Context, node: NodeView, wait_s: float, config: RoutingConfig) -> set[int]:
    """How many blocks may be the best to fetch."""
    most_blocks = node.fetchable_blocks
    match config.fetch:
        case FetchRule.NEVER:
            return {0}
        case FetchRule.ALWAYS:
            return {most_blocks}
        case FetchRule.SOONER:
            hidden_blocks = _tokens_within(wait_s, node, config) // context.block_tokens
            return {0, most_blocks, min(hidden_blocks, most_blocks), min(hidden_blocks + 1, most_blocks)}


def _reused_tokens(context: Context, node: NodeView, fetched_blocks: int) -> tuple[int, int]:
    """What the node reuses of a prompt once so many blocks are fetched, and what of it has to be restored.

    The last token is always computed: its logits give the first output token.
    """
    cached = min((node.any_blocks + fetched_blocks) * context.block_tokens, max(0, context.tokens - 1))
    return cached, cached - min(node.l1_blocks * context.block_tokens, cached)


def fetch_s(tokens: int, node: NodeView, config: RoutingConfig) -> float:
    """F_n: seconds until KV of so many tokens of this request is in the node's own host memory; 0 for none.

    The node reads for its legs in the order of its queue, so what they still lack comes first, just as their service
    is in W_n. The rate is the node's own word, the configured one until it has read something.
    """
    if tokens == 0:
        return 0.0
    return config.fetch_fixed_s + (node.fetch_backlog_tokens + tokens) * fetch_token_s(node, config)


def _evicted_tokens(context: Context, node: NodeView) -> float:
    """Tokens counted by a branch that leave the node's host memory for this context: what it lacks beyond its room."""
    return max(0.0, context.lacking_tokens(node.any_blocks) - node.room_tokens)


def duplicate_s(context: Context, node: NodeView, config: RoutingConfig) -> float:
    """dup_n: seconds of later work expected because this context drives other KV out of the node.

    The node will store all it lacks of the context, fetched or computed: duplicates of what lies elsewhere and new
    tokens alike. New ones have to be stored somewhere, but where decides what goes: a node with `room_tokens`, free or
    counted by no branch, loses nothing by them. Beyond its room each token stored evicts a counted one. A live branch
    goes on with each of those, so each is expected to be missed once. Where another node has it, missing it costs the
    cheaper of a fetch and computing; else computing, at the marginal cost of a token at the end of a context as long
    as this one, for the ends of contexts are evicted first. How many lie elsewhere is not known of what will be
    evicted; `spare_share` of this context stands for it.

    What every candidate would evict alike is in all their totals and decides nothing.
    """
    coefficients = node.coefficients
    fixed_s = coefficients.c0_s / node.new_tokens_per_iteration
    compute_token_s = fixed_s + coefficients.c1_s + coefficients.c2_s * context.tokens
    fetches = config.fetch is not FetchRule.NEVER
    again_token_s = min(compute_token_s, fetch_token_s(node, config)) if fetches else compute_token_s
    spare = context.spare_share
    return _evicted_tokens(context, node) * (spare * again_token_s + (1.0 - spare) * compute_token_s)


def fetch_token_s(node: NodeView, config: RoutingConfig) -> float:
    """Seconds a token takes to fetch."""
    if node.fetch_tokens_per_s > 0:
        return 1.0 / node.fetch_tokens_per_s
    return node.kv_bytes_per_token / config.fetch_bytes_per_s


def _tokens_within(wait_s: float, node: NodeView, config: RoutingConfig) -> int:
    """Most tokens whose F_n is at most `wait_s`."""
    token_s = fetch_token_s(node, config)
    spare_s = wait_s - config.fetch_fixed_s - node.fetch_backlog_tokens * token_s
    return int(min(spare_s / token_s, 1e9)) if spare_s > 0 and token_s > 0 else 0
