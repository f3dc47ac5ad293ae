"""Where a request is decoded: a free slot, then the least cost in seconds. Pure: candidates are scored, one is picked.

Going to a node costs four things. The request waits until device memory has room for it. What the node lacks of the
context is sent there. What that evicts from its host memory, where each completed block is written through, has to be
brought back or computed again. And the iterations of the request, and of those decoded beside it, take as long as the
node's batch makes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from evolving.core.candidates import BORROWED, NodeView, eligible_ids, tie_key, why_not
from evolving.core.routing import Context, RoutingConfig, duplicate_s, fetch_token_s
from evolving.core.terms import Role
from evolving.core.timemodel import DecodeCoefficients


@dataclass(frozen=True, slots=True)
class DecodeNode:
    """What a gateway knows of a node that could decode."""

    node: NodeView  # who it is, what it holds of the context, its room in host memory, and what KV costs it
    slots_free: int  # requests it could take now, the gateway's own unacknowledged ones taken off
    decoding: int  # B, those that have a slot and are about to start included
    context_tokens: int  # summed over them
    memory_tokens: float  # of device memory: what those leave to another one; below 0 where some of them wait for it
    coefficients: DecodeCoefficients  # equation 2 on this node
    prefilled_here: bool = False  # the request: nothing is sent, and nothing more is stored


@dataclass(frozen=True, slots=True)
class DecodeScore:
    """One candidate for decode, with what going there costs, seconds."""

    node_id: str
    eligible: bool
    reason: str
    slots_free: int = 0
    received_tokens: int = 0  # sent there from the prefill node
    stored_tokens: int = 0  # what its host memory lacks of the context
    wait_s: float = 0.0  # until device memory has room for it
    receive_s: float = 0.0  # the time that sending takes
    evict_s: float = 0.0  # later work, because storing the context drives other KV out of host memory
    decode_s: float = 0.0  # the request's iterations, and by how much they make those of the others longer
    iteration_s: float = 0.0  # T_D(B + 1) with this request in the batch

    @property
    def move_s(self) -> float:
        """What is owed to the context not being there."""
        return self.receive_s + self.evict_s

    @property
    def total_s(self) -> float:
        """All that going there costs."""
        return self.wait_s + self.move_s + self.decode_s

    @property
    def tie(self) -> tuple[float, int, int]:
        """What tells nodes apart that tie; the smallest is chosen."""
        return self.move_s, self.stored_tokens, -self.slots_free


@dataclass(frozen=True, slots=True)
class DecodeDecision:
    """The node chosen for decode; None when no node can take the request."""

    chosen: DecodeScore | None
    candidates: tuple[DecodeScore, ...]
    reason: str


def choose_decode(context: Context, nodes: Iterable[DecodeNode], config: RoutingConfig) -> DecodeDecision:
    """Pick the decode node with a free slot where the request costs least.

    A full node stays a candidate, but never before one with a slot: the KV waits on the prefill node until it has one.
    Nodes whose total exceeds the least by at most `tie_share` of that one's iterations tie; of these, the least to
    move wins, then the least to store, since even room that costs nothing now is room for one context only, then the
    most free slots, then a hash of request and node. Nodes of the DECODE or MIXED role are candidates; where none of
    them can serve, any other live node that isn't draining is.
    """
    nodes = sorted(nodes, key=lambda each: each.node.node_id)
    serving, borrowed = eligible_ids((each.node for each in nodes), Role.DECODE)
    scores = tuple(
        score_decode(context, each, config)
        if each.node.node_id in serving
        else DecodeScore(each.node.node_id, False, why_not(each.node))
        for each in nodes
    )
    eligible = [score for score in scores if score.eligible]
    if not eligible:
        return DecodeDecision(None, scores, "no live node can decode")
    roomy = [score for score in eligible if score.slots_free > 0]
    best = min(roomy or eligible, key=lambda score: score.total_s)
    tied = [score for score in roomy or eligible if score.total_s <= best.total_s + config.tie_share * best.decode_s]
    chosen = min(tied, key=lambda score: (*score.tie, tie_key(context.request_id, score.node_id)))
    reason = "costs least" if len(tied) == 1 else f"least to move among {len(tied)} that tie"
    if not roomy:
        reason += "; all are full"
    return DecodeDecision(chosen, scores, reason + (BORROWED if borrowed else ""))


def score_decode(context: Context, decoding: DecodeNode, config: RoutingConfig) -> DecodeScore:
    """What decoding on this node costs.

    - `wait_s`: the others are anywhere in their outputs, so that their memory becomes free evenly over the time a whole
      output takes, n·T_D(B): until enough of it is, that times the share of it that this context needs. Where nobody
      decodes there is nobody to wait for.
    - `receive_s`: a decode node reads no host memory, so all that its device memory lacks is sent, at the rate of a
      fetch: the same bytes over the same network, from device memory at least as fast.
    - `evict_s`: as dup_n, by what its host memory lacks and has room for.
    - `decode_s` = n · ((B + 1)·T_D(B + 1) − B·T_D(B)): n iterations of T_D(B + 1), and n times the wait of each of the
      B others for the difference.

    n is `output_tokens` of the configuration, in `decode_s` what the request may still generate where that is less; as
    if each iteration gave one token, since nobody says here how many are accepted. Prefilled on this node, the request
    has its memory, and nothing to be sent or stored.
    """
    node, coefficients = decoding.node, decoding.coefficients
    batch, batch_tokens = decoding.decoding, decoding.context_tokens
    with_it_s = coefficients.decode_iteration_s(batch + 1, batch_tokens + context.tokens)
    without_s = coefficients.decode_iteration_s(batch, batch_tokens)
    received_tokens = stored_tokens = 0
    wait_s = receive_s = evict_s = 0.0
    if not decoding.prefilled_here:
        received_tokens = max(0, context.tokens - node.l1_blocks * context.block_tokens)
        stored_tokens = context.lacking_tokens(node.any_blocks)
        if batch:
            missing_share = min(1.0, max(0.0, context.tokens - decoding.memory_tokens) / max(1, batch_tokens))
            wait_s = missing_share * config.output_tokens * without_s
        receive_s = received_tokens * fetch_token_s(node, config)
        evict_s = duplicate_s(context, node, config)
    iterations = min(config.output_tokens, context.output_tokens_max)
    return DecodeScore(
        node.node_id,
        True,
        "has a slot" if decoding.slots_free > 0 else "full",
        slots_free=decoding.slots_free,
        received_tokens=received_tokens,
        stored_tokens=stored_tokens,
        wait_s=wait_s,
        receive_s=receive_s,
        evict_s=evict_s,
        decode_s=iterations * ((batch + 1) * with_it_s - batch * without_s),
        iteration_s=with_it_s,
    )
