"""A cluster in virtual time: requests are routed by the product's own rules, and go from node to node.

What a gateway knows of the nodes, it knows here at once and exactly. Transfers and fetches have a rate each and do not
slow each other down, but for the fetches of one node, which take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from evolving.core.candidates import NodeView
from evolving.core.decode_routing import DecodeNode, choose_decode
from evolving.core.planner import Split, effective_roles
from evolving.core.routing import Context, RoutingConfig, choose_prefill
from evolving.core.slices import DecodeDone, PrefillDone
from evolving.core.terms import Role
from evolving.core.timemodel import PrefillSums
from evolving.core.work import PrefillWork, sum_work
from evolving_sim.events import EventHeap, Priority
from evolving_sim.legs import DecodeLeg, PrefillLeg, Request
from evolving_sim.node_config import NodeConfig
from evolving_sim.node_kv import Branch, Depth, NodeKv
from evolving_sim.sim_node import NodeCallbacks, SimNode


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who hears of work that was done."""

    prefilled: Callable[[PrefillDone], None] = lambda _: None
    decoded: Callable[[DecodeDone], None] = lambda _: None
    done: Callable[[Request], None] = lambda _: None


@dataclass(slots=True, eq=False, repr=False)
class SimCluster:
    """Nodes, who does what on them, and the requests there are."""

    events: EventHeap
    configs: Mapping[str, NodeConfig]  # by node
    split: Split
    routing: RoutingConfig
    listeners: list[Listeners] = field(default_factory=list)
    nodes: dict[str, SimNode] = field(init=False)
    roles: dict[str, Role] = field(init=False)
    open_requests: int = field(init=False, default=0)  # accepted and unfinished, wherever they are
    _open_s: float = field(init=False, default=0.0)  # its integral over time
    _open_until_s: float = field(init=False, default=0.0)
    _decodes: dict[str, DecodeLeg] = field(init=False, default_factory=dict)  # by request, from their choice on
    _prefills: dict[str, PrefillLeg] = field(init=False, default_factory=dict)  # by request, until the first token
    _reads_free_s: dict[str, float] = field(init=False)  # when a node's fetches asked for so far are over
    _recalled: int = field(init=False, default=0)  # branches

    def __post_init__(self) -> None:
        self.nodes = {node_id: self._node(node_id, config) for node_id, config in sorted(self.configs.items())}
        self.roles = effective_roles(self.split, self.nodes)
        self._reads_free_s = dict.fromkeys(self.nodes, 0.0)

    def _node(self, node_id: str, config: NodeConfig) -> SimNode:
        callbacks = NodeCallbacks(
            taken=partial(self._taken, node_id),
            prefilled=self._prefilled,
            granted=self._move,
            decoded=self._decoded,
        )
        return SimNode(node_id, config, self.events, callbacks, NodeKv(config.l1_tokens // config.block_tokens))

    # -- what happens to it

    def submit(self, request: Request) -> None:
        """A request comes."""
        self._count_open(1)
        self._route(request)

    def change(self, split: Split) -> None:
        """Another split is in force: what waits goes elsewhere, what runs finishes where it is (DESIGN §8)."""
        before, self.split, self.roles = self.roles, split, effective_roles(split, self.nodes)
        changed = [node for node_id, node in self.nodes.items() if self.roles[node_id] is not before[node_id]]
        for leg in [leg for node in changed for leg in node.give_up_queue()]:
            del self._prefills[leg.request.request_id]
            self._route(leg.request)
        for decode in [leg for node in changed for leg in node.give_up_waiting()]:
            self._choose_decode(decode)

    def recall(self, branch: Branch, tokens: int) -> None:
        """The first `tokens` of a branch were computed before the run: a node, each in its turn, has them in L2."""
        node = list(self.nodes.values())[self._recalled % len(self.nodes)]
        self._recalled += 1
        node.kv.fetch(branch, tokens // node.config.block_tokens)

    def rewrite(self, branch: Branch, kept_tokens: int) -> None:
        """A branch's context is another after its first `kept_tokens`."""
        for node in self.nodes.values():
            node.kv.rewrite(branch, kept_tokens // node.config.block_tokens)

    def end_branch(self, branch: Branch) -> None:
        """A branch ended: nobody asks for its KV again."""
        for node in self.nodes.values():
            node.kv.drop(branch)

    def open_request_s(self) -> float:
        """Open requests, summed over time so far: request-seconds."""
        self._count_open(0)
        return self._open_s

    def oldest_open_s(self) -> float:
        """How long the request has been open that has been longest, seconds; 0: none is open."""
        requests = [leg.request for leg in self._prefills.values()] + [leg.request for leg in self._decodes.values()]
        return max((self.events.now_s - request.sent_s for request in requests), default=0.0)

    def _count_open(self, change: int) -> None:
        self._open_s += self.open_requests * (self.events.now_s - self._open_until_s)
        self._open_until_s = self.events.now_s
        self.open_requests += change

    # -- prefill

    def _route(self, request: Request) -> None:
        size = next(iter(self.configs.values())).block_tokens
        reusable = (request.prompt_tokens - 1) // size
        depths = {node_id: node.kv.depth(request.branch, reusable) for node_id, node in self.nodes.items()}
        pool_blocks = max(each.any_blocks for each in depths.values())
        context = Context(
            request.request_id, request.prompt_tokens, size, pool_blocks, output_tokens_max=request.output_tokens
        )
        views = [
            self._view(node, depths[node.node_id], pool_blocks, node.wait_s) for node in self._candidates(Role.PREFILL)
        ]
        chosen = choose_prefill(context, views, self.routing).chosen
        assert chosen is not None, "every node lives"
        assert chosen.work is not None
        until = depths[chosen.node_id].any_blocks + chosen.fetched_blocks
        work = chosen.work
        leg = PrefillLeg(request, until, chosen.fetched_blocks == 0, work.cached_tokens, work.restored_tokens)
        self._prefills[request.request_id] = leg
        self.nodes[chosen.node_id].enqueue(leg)
        if chosen.fetched_blocks:
            self._fetch(self.nodes[chosen.node_id], leg, chosen.fetched_blocks * size)

    def _fetch(self, node: SimNode, leg: PrefillLeg, tokens: int) -> None:
        """Peers' KV comes while the leg waits, after what the node reads for others."""
        begins_s = max(self.events.now_s, self._reads_free_s[node.node_id])
        free_s = self._reads_free_s[node.node_id] = begins_s + tokens / node.config.fetch_tokens_per_s

        def over() -> None:
            if leg in node.queue:  # else it was sent elsewhere
                node.fetched(leg)

        self.events.at(free_s + node.config.fetch_fixed_s, Priority.ARRIVAL, over)

    def _candidates(self, phase: Role) -> list[SimNode]:
        """The nodes that routing would not turn down for their role."""
        serving = [node for node in self.nodes.values() if self.roles[node.node_id] in (phase, Role.MIXED)]
        return serving or list(self.nodes.values())

    def _view(self, node: SimNode, depth: Depth, pool_blocks: int, wait_s: float) -> NodeView:
        config = node.config
        backlog_s = max(0.0, self._reads_free_s[node.node_id] - self.events.now_s)
        return NodeView(
            node_id=node.node_id,
            role=self.roles[node.node_id],
            ready=True,
            wait_s=wait_s,
            new_tokens_per_iteration=node.new_tokens_per_iteration,
            coefficients=config.prefill,
            kv_bytes_per_token=config.kv_bytes_per_token,
            l1_blocks=depth.l1_blocks,
            any_blocks=depth.any_blocks,
            fetchable_blocks=pool_blocks - depth.any_blocks,
            fetch_tokens_per_s=config.fetch_tokens_per_s,
            fetch_backlog_tokens=round(backlog_s * config.fetch_tokens_per_s),
        )

    def _taken(self, node_id: str, leg: PrefillLeg) -> None:
        """A prompt left the queue: its decode node is chosen now (DESIGN §6)."""
        request, config = leg.request, self.configs[node_id]
        iterations = config.decode_iterations(request.output_tokens)
        if iterations == 0:
            return
        context = request.prompt_tokens + 1
        decode = DecodeLeg(request, node_id, "", iterations, iterations, config.accepted_tokens, context)
        self._decodes[request.request_id] = decode
        self._choose_decode(decode)

    def _prefilled(self, leg: PrefillLeg) -> None:
        request = leg.request
        del self._prefills[request.request_id]
        request.first_token_s = self.events.now_s
        work = PrefillWork(leg.uncached_tokens, leg.cached_tokens, leg.restored_tokens)
        self._tell_prefilled(request, sum_work((work,)))
        decode = self._decodes.get(request.request_id)
        if decode is None:
            self._tell_done(request, DecodeDone(request.request_id, 0))
            return
        decode.prefilled = True
        if decode.granted:
            self._move(decode)

    # -- decode

    def _choose_decode(self, leg: DecodeLeg) -> None:
        request = leg.request
        size = self.configs[leg.source].block_tokens
        context = Context(request.request_id, request.prompt_tokens, size, output_tokens_max=request.output_tokens)
        nodes = [self._decode_node(node, leg, request.prompt_tokens // size) for node in self._candidates(Role.DECODE)]
        chosen = choose_decode(context, nodes, self.routing).chosen
        assert chosen is not None, "every node lives"
        leg.node_id = chosen.node_id
        self.nodes[chosen.node_id].reserve(leg)

    def _decode_node(self, node: SimNode, leg: DecodeLeg, blocks: int) -> DecodeNode:
        depth = node.kv.depth(leg.request.branch, blocks)
        return DecodeNode(
            node=self._view(node, depth, depth.any_blocks, wait_s=0.0),
            slots_free=node.slots_free,
            decoding=node.decoding,
            context_tokens=node.context_tokens,
            memory_tokens=node.room_tokens,
            coefficients=node.config.decode,
            prefilled_here=node.node_id == leg.source,
        )

    def _move(self, leg: DecodeLeg) -> None:
        """Send what the decode node lacks, once it has a slot and the prompt is computed."""
        if not leg.prefilled:
            return
        node = self.nodes[leg.node_id]
        if leg.node_id == leg.source:
            node.join(leg)
            return
        request, size = leg.request, node.config.block_tokens
        lacking = request.prompt_tokens - node.kv.depth(request.branch, request.prompt_tokens // size).l1_blocks * size

        def arrived() -> None:
            node.kv.store(request.branch, request.prompt_tokens // size)
            node.join(leg)

        self.events.after(node.config.transfer_s(lacking), Priority.ARRIVAL, arrived)

    def _decoded(self, leg: DecodeLeg) -> None:
        request, node = leg.request, self.nodes[leg.node_id]
        # The last token has no KV yet.
        node.kv.store(request.branch, (request.prompt_tokens + request.output_tokens - 1) // node.config.block_tokens)
        del self._decodes[request.request_id]
        done = DecodeDone(request.request_id, leg.iterations, leg.context_sum / leg.iterations)
        self._tell_done(request, done)

    def _tell_prefilled(self, request: Request, work: PrefillSums) -> None:
        for listener in self.listeners:
            listener.prefilled(PrefillDone(request.request_id, work))

    def _tell_done(self, request: Request, decode: DecodeDone) -> None:
        request.done_s = self.events.now_s
        self._count_open(-1)
        for listener in self.listeners:
            listener.decoded(decode)
            listener.done(request)
        request.on_done()

    def check_invariants(self) -> None:
        """Assert that every open request is in one place, and what nodes assert of themselves."""
        self.events.check_invariants()
        for node in self.nodes.values():
            node.check_invariants()
        prefilling = [leg for node in self.nodes.values() for leg in (*node.queue, *node.running)]
        assert {id(leg) for leg in prefilling} == {id(leg) for leg in self._prefills.values()}
        decoding = sum(node.decoding + len(node.waiting) for node in self.nodes.values())
        assert decoding == len(self._decodes)
        past_prefill = sum(leg.prefilled for leg in self._decodes.values())
        assert self.open_requests == len(prefilling) + past_prefill
