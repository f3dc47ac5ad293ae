"""A cluster in virtual time: requests are routed by an arm's policies and go from node to node.

The directory, the nodes' pools and what is reckoned of nodes are the product's own core. What a gateway knows of the
nodes' queues it knows here at once and exactly; of what they hold it knows what the directory has heard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from evolving.core.config import EvictionPolicy, FetchRule
from evolving.core.directory_types import Match
from evolving.core.holders import HolderHint
from evolving.core.planner import Split, effective_roles
from evolving.core.pool_runs import Use
from evolving.core.routing import RoutingConfig
from evolving.core.slices import DecodeDone, PrefillDone
from evolving.core.terms import Phase, Role
from evolving.core.timemodel import PrefillSums
from evolving.core.work import PrefillWork
from evolving_sim.arms.arm import Arm, FetchMode, Policies, PolicySetup
from evolving_sim.events import EventHeap, Priority
from evolving_sim.fetching import Fetching
from evolving_sim.kv import NodeKv
from evolving_sim.legs import DecodeLeg, PrefillLeg, Request
from evolving_sim.links import Links
from evolving_sim.node_config import NodeConfig
from evolving_sim.produced import ProducedKv
from evolving_sim.role_changes import RoleChange, RoleChanges
from evolving_sim.sim_directory import SimDirectory
from evolving_sim.sim_node import NodeCallbacks, SimNode
from evolving_sim.views import NOTHING, Views

EVENT_DELAY_S = 0.005
"""Until the directory knows what a node holds, and the node how needed that is: each goes over a stream, which takes
some milliseconds."""


class TooLong(ValueError):
    """A request that a node has not device memory enough for."""


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who hears of what was done."""

    prefilled: Callable[[PrefillDone], None] = lambda _: None
    decoded: Callable[[DecodeDone], None] = lambda _: None
    done: Callable[[Request], None] = lambda _: None
    role_changed: Callable[[RoleChange], None] = lambda _: None  # that is over
    members_changed: Callable[[], None] = lambda: None  # a node went or came


@dataclass(slots=True, eq=False, repr=False)
class SimCluster:
    """Nodes, who does what on them, and the requests there are."""

    events: EventHeap
    configs: Mapping[str, NodeConfig]  # by node
    split: Split
    arm: Arm
    seed: int = 1
    event_delay_s: float = EVENT_DELAY_S
    gateway_s: float = 0.0  # from a request's coming to its routing
    listeners: list[Listeners] = field(default_factory=list)
    nodes: dict[str, SimNode] = field(init=False)
    roles: dict[str, Role] = field(init=False)  # in effect, of live nodes
    routing: RoutingConfig = field(init=False)
    policies: Policies = field(init=False)
    directory: SimDirectory = field(init=False)
    changes: RoleChanges = field(init=False)
    produced: ProducedKv = field(init=False, default_factory=ProducedKv)
    requests: dict[str, Request] = field(init=False, default_factory=dict)  # accepted and unfinished, in order
    _open_s: float = field(init=False, default=0.0)  # their number's integral over time
    _open_until_s: float = field(init=False, default=0.0)
    prefills: dict[str, PrefillLeg] = field(init=False, default_factory=dict)  # by request, until its KV is sent on
    decodes: dict[str, DecodeLeg] = field(init=False, default_factory=dict)  # by request, from their choice on
    _sent: dict[str, int] = field(init=False, default_factory=dict)  # by prefill node, of open requests
    reads: Links = field(init=False)  # of peers' host memory
    transfers: Links = field(init=False)  # from device memory to device memory
    fetching: Fetching = field(init=False)
    views: Views = field(init=False)
    _coming: set[str] = field(init=False, default_factory=set)  # requests that are yet to be routed
    _recalled: int = field(init=False, default=0)  # contexts
    _numbered: int = field(init=False, default=0)  # prefill legs

    def __post_init__(self) -> None:
        self.configs = configs = {node_id: self._restoring(config) for node_id, config in sorted(self.configs.items())}
        first = next(iter(configs.values()))
        pool = self.arm.fetch is not FetchMode.NONE
        rule = FetchRule.SOONER if pool else FetchRule.NEVER
        routing = RoutingConfig(
            fetch_bytes_per_s=first.fetch_bytes_per_s, fetch_fixed_s=first.fetch_fixed_s, fetch=rule
        )
        self.routing = routing
        self.policies = self.arm.policies(PolicySetup(routing, self.seed))
        counts = self.arm.eviction is EvictionPolicy.AGENT
        self.directory = SimDirectory(self.events, self.event_delay_s, counts=counts)
        self.reads = Links(
            self.events,
            {node_id: config.serve_bytes_per_s for node_id, config in configs.items()},
            {node_id: config.fetch_bytes_per_s for node_id, config in configs.items()},
            {node_id: config.fetch_fixed_s for node_id, config in configs.items()},
        )
        rates = {node_id: config.transfer_bytes_per_s for node_id, config in configs.items()}
        fixed_s = {node_id: config.transfer_fixed_s for node_id, config in configs.items()}
        self.transfers = Links(self.events, rates, rates, fixed_s)
        self.nodes = {node_id: self.make_node(node_id) for node_id in configs}
        for node_id, node in self.nodes.items():
            self.directory.node_up(node_id, node.kv)
        self.roles = effective_roles(self.split, self.nodes)
        self.changes = RoleChanges(self)
        self.fetching = Fetching(self.nodes, self.reads)
        self.views = Views(self.nodes, self.reads, pool, self._sent)

    def _restoring(self, config: NodeConfig) -> NodeConfig:
        """No faster than the arm does it."""
        c3_s = max(config.prefill.c3_s, 1.0 / self.arm.restored_tokens_per_s)
        return replace(config, prefill=replace(config.prefill, c3_s=c3_s))

    def make_node(self, node_id: str) -> SimNode:
        """A node whose engine is empty."""
        config = self.configs[node_id]
        callbacks = NodeCallbacks(
            fetch=self._fetch,
            taken=self._taken,
            prefilled=self._prefilled,
            granted=self._granted,
            decoded=self._decoded,
            begun=lambda _: self.changes.begun(node_id),
        )
        kv = NodeKv(config, self.arm.eviction, self.arm.host_copies, partial(self.directory.changed, node_id))
        at_start = self.arm.fetch is FetchMode.AT_START
        return SimNode(node_id, config, self.events, callbacks, kv, at_start)

    @property
    def block_tokens(self) -> int:
        """Tokens in a block of KV."""
        return next(iter(self.configs.values())).block_tokens

    @property
    def open_requests(self) -> int:
        """Accepted and unfinished, wherever they are."""
        return len(self.requests)

    # -- what happens to it

    def submit(self, request: Request) -> None:
        """A request comes. Raises TooLong."""
        config = next(iter(self.configs.values()))
        tokens, most = request.prompt_tokens + request.output_tokens, config.l1_tokens - config.reserve_tokens
        if tokens > most:
            raise TooLong(
                f"{request.request_id} has {tokens} tokens of context, and a node room for {most}: "
                "give nodes more l1_tokens, or cut the workload"
            )
        self._count_open()
        self.requests[request.request_id] = request
        if self.gateway_s:
            self._coming.add(request.request_id)
            self.events.after(self.gateway_s, Priority.ARRIVAL, partial(self._begin, request))
        else:
            self._begin(request)

    def _begin(self, request: Request) -> None:
        self._coming.discard(request.request_id)
        config = next(iter(self.configs.values()))
        reusable = (request.prompt_tokens - 1) // config.block_tokens
        request.ideal_tokens = self.produced.known_blocks(request.names, reusable) * config.block_tokens
        self._route(request, self.directory.begin(request, config.block_tokens))

    def change(self, split: Split) -> None:
        """Another split is in force: what waits goes elsewhere, what runs finishes where it is (DESIGN §8)."""
        self.changes.carry_out(split)

    def recall(self, names: Sequence[bytes], blocks: int) -> None:
        """The first `blocks` of a context were computed before the run: a node, each in its turn, has them in L2.

        One that prefills, where there is no pool: no other could use them.
        """
        nodes = self.candidates(Role.PREFILL) if self.arm.fetch is FetchMode.NONE else list(self.nodes.values())
        node = nodes[self._recalled % len(nodes)]
        self._recalled += 1
        node.kv.pool.store(names, 0, blocks)
        self.produced.add(names, blocks)
        self.directory.catch_up(node.node_id)

    def end_branch(self, branch_id: str) -> None:
        """A branch ended: nobody asks for its context again."""
        self.directory.end(branch_id)

    def open_request_s(self) -> float:
        """Open requests, summed over time so far: request-seconds."""
        self._count_open()
        return self._open_s

    def oldest_open_s(self) -> float:
        """How long the request has been open that has been longest, seconds; 0: none is open."""
        oldest = next(iter(self.requests.values()), None)
        return self.events.now_s - oldest.sent_s if oldest is not None else 0.0

    def _count_open(self) -> None:
        self._open_s += len(self.requests) * (self.events.now_s - self._open_until_s)
        self._open_until_s = self.events.now_s

    # -- prefill

    def candidates(self, phase: Role) -> list[SimNode]:
        """The nodes that serve a phase, or, where there is none, those that serve the other one; by id."""
        roles, nodes = self.roles, self.nodes
        serving = [nodes[node_id] for node_id, role in roles.items() if role is phase or role is Role.MIXED]
        if serving:
            return serving
        lent = [nodes[node_id] for node_id, role in roles.items() if role is not Role.DRAINING]
        return lent or [nodes[node_id] for node_id in roles]

    def _route(self, request: Request, match: Match) -> None:
        runs = self.views.readable(match)
        asked = self.views.asked(request, match, runs, self.block_tokens)
        views = self.views.prefill_nodes(match, runs, self.candidates(Role.PREFILL), self.roles)
        choice = self.policies.prefill.choose(asked, views, self.events.now_s)
        node = self.nodes[choice.node_id]
        size, tokens, depth = self.block_tokens, request.context_tokens, match.nodes.get(node.node_id, NOTHING)
        reusable = (tokens - 1) // size
        sent = _work(tokens, (depth.either_blocks + choice.fetched_blocks) * size, depth.l1_blocks * size)
        held = until = node.kv.pool.held(request.names, reusable)
        hints: Sequence[HolderHint] = ()
        if runs and (choice.fetched_blocks or held < depth.either_blocks):
            end_block = depth.either_blocks + choice.fetched_blocks
            hints = self.views.hints(runs, node.node_id, depth.either_blocks, end_block)
            for hint in hints:
                if hint.first_block <= until:
                    until = max(until, min(hint.first_block + hint.blocks, reusable))
        reckoned = _work(tokens, until * size, depth.l1_blocks * size)
        self._numbered += 1
        leg = PrefillLeg(
            request,
            self._numbered,
            node.node_id,
            tokens,
            match,
            runs,
            node.kv.leg(request.names, Use.PREFILL),
            reckoned.cached_tokens,
            reckoned.restored_tokens,
            hints,
            until,
            fetch_over=until == held,
            fetch_from_blocks=held,
            coming_tokens=(until - held) * size,
        )
        request.prefill_node = node.node_id
        self._sent[node.node_id] = self._sent.get(node.node_id, 0) + 1
        self.prefills[request.request_id] = leg
        node.enqueue(leg, sent)
        if self.arm.reserves_first:
            self._reserve(leg)
        if not leg.fetch_over and self.arm.fetch is FetchMode.ASYNC:
            self.fetching.begin(leg)

    def _fetch(self, leg: PrefillLeg) -> None:
        self.fetching.begin(leg)

    def reroute(self, leg: PrefillLeg) -> None:
        """A prompt that waits goes to the queue of whichever node is best now."""
        self.withdraw(leg)
        self.route_again(leg.request)

    def withdraw(self, leg: PrefillLeg) -> None:
        """A prompt leaves its node, in whatever stage it is."""
        decode = self.decodes.pop(leg.request.request_id, None) if self.arm.reserves_first else None
        if decode is not None:
            self.nodes[decode.node_id].drop_decode(decode)
            self.changes.check(decode.node_id)
        self.fetching.stop(leg)
        del self.prefills[leg.request.request_id]
        if not leg.gone:
            self.nodes[leg.node_id].drop(leg)
        self.changes.check(leg.node_id)

    def route_again(self, request: Request) -> None:
        """A request that lost its prefill node, or left it, is sent anew."""
        self._sent[request.prefill_node] -= 1
        self._route(request, self.directory.rematch(request, self.block_tokens))

    def _taken(self, leg: PrefillLeg) -> None:
        """A prompt left the queue: its decode node is chosen now (DESIGN §6)."""
        request, size = leg.request, self.block_tokens
        request.taken_s = self.events.now_s
        request.cached_tokens = min(leg.cached_tokens, request.prompt_tokens)
        request.fetched_tokens = min(leg.fetched_blocks * size, request.cached_tokens)
        if not self.arm.reserves_first:
            self._reserve(leg)

    def _reserve(self, leg: PrefillLeg) -> None:
        """Choose who decodes, and ask for room there; nobody, where prefill gives all there is."""
        request, config = leg.request, self.configs[leg.node_id]
        iterations = config.decode_iterations(request.output_tokens - request.generated_tokens)
        if iterations:
            decode = DecodeLeg(request, leg, iterations, config.accepted_tokens)
            leg.awaits_room = self.arm.reserves_first
            self.decodes[request.request_id] = decode
            self.choose_decode(decode)

    def _prefilled(self, leg: PrefillLeg) -> None:
        request = leg.request
        leg.prefilled = True
        if request.generated_tokens == 0:
            request.first_token_s = self.events.now_s
        work = PrefillSums(leg.uncached_tokens, leg.query_key_pairs, leg.restored_tokens, leg.cached_tokens)
        for listener in self.listeners:
            listener.prefilled(PrefillDone(request.request_id, work))
        blocks = request.prompt_tokens // self.block_tokens
        self.directory.landed(request, Phase.PREFILL, leg.node_id, blocks)
        decode = self.decodes.get(request.request_id)
        if decode is None:
            self.directory.request_done(request, leg.node_id)
            self._release(leg)
            self._finish(request, DecodeDone(request.request_id, 0))
        elif decode.granted:
            self._move(decode)

    def _release(self, leg: PrefillLeg) -> None:
        """A prompt's KV is where it is needed."""
        del self.prefills[leg.request.request_id]
        self.nodes[leg.node_id].drop(leg)
        self.changes.check(leg.node_id)

    # -- decode

    def choose_decode(self, leg: DecodeLeg) -> None:
        """Find the node that decodes, and ask it for room."""
        request, prefill = leg.request, leg.prefill
        asked = self.views.asked(request, prefill.match, prefill.runs, self.block_tokens)
        views = self.views.decode_nodes(prefill, self.candidates(Role.DECODE), self.roles)
        node = self.nodes[self.policies.decode.choose(asked, views, self.events.now_s)]
        leg.node_id = request.decode_node = node.node_id
        leg.kv = node.kv.leg(request.names, Use.DECODE)
        lacking = asked.context.lacking_tokens(prefill.match.nodes.get(node.node_id, NOTHING).either_blocks)
        leg.stored_tokens = 0 if node.node_id == prefill.node_id else lacking
        node.reserve(leg)

    def move_answer(self, leg: DecodeLeg) -> None:
        """An answer that waits for room does so elsewhere, or chooses again."""
        self.nodes[leg.node_id].drop_decode(leg)
        leg.gone = False
        self.choose_decode(leg)

    def _granted(self, leg: DecodeLeg) -> None:
        """An answer has a slot and room."""
        if leg.prefill.awaits_room:
            leg.prefill.awaits_room = False
            self.nodes[leg.prefill.node_id].wake()
        self._move(leg)

    def _move(self, leg: DecodeLeg) -> None:
        """Send what the decode node lacks, once it has a slot and the prompt is computed."""
        if not leg.prefilled:
            return
        if leg.node_id == leg.prefill.node_id:
            self._arrived(leg)
            return
        config = self.configs[leg.node_id]
        lacking = leg.prefill.context_tokens - leg.kv.blocks * config.block_tokens
        size_bytes = lacking * config.kv_bytes_per_token
        self.transfers.send(leg.prefill.node_id, leg.node_id, size_bytes, partial(self._arrived, leg))

    def _arrived(self, leg: DecodeLeg) -> None:
        """A prompt's KV is on its decode node."""
        if leg.gone:
            return
        request, size = leg.request, self.block_tokens
        self.nodes[leg.node_id].join(leg)
        blocks = request.prompt_tokens // size
        self.directory.landed(request, Phase.DECODE, leg.node_id, blocks)
        self.directory.output(request, leg.node_id, blocks, leg.prefill.context_tokens // size)
        self._release(leg.prefill)

    def _decoded(self, leg: DecodeLeg) -> None:
        request, size = leg.request, self.block_tokens
        del self.decodes[request.request_id]
        # The last token has no KV yet.
        blocks = (request.prompt_tokens + request.output_tokens - 1) // size
        self.directory.output(request, leg.node_id, leg.prefill.context_tokens // size, blocks)
        self.directory.request_done(request, leg.node_id)
        self.changes.check(leg.node_id)
        self._finish(request, DecodeDone(request.request_id, leg.iterations, leg.mean_context_tokens))

    def _finish(self, request: Request, decode: DecodeDone) -> None:
        self._count_open()
        del self.requests[request.request_id]
        self._sent[request.prefill_node] -= 1
        request.done_s = self.events.now_s
        self.produced.add(request.names, (request.prompt_tokens + request.output_tokens - 1) // self.block_tokens)
        for listener in self.listeners:
            listener.decoded(decode)
            listener.done(request)
        request.on_done()

    def check_invariants(self) -> None:
        """Assert that every open request is in one place, and what the parts assert of themselves."""
        self.events.check_invariants()
        self.directory.check_invariants()
        self.reads.check_invariants()
        self.transfers.check_invariants()
        for node in self.nodes.values():
            node.check_invariants()
        prompts = [leg for node in self.nodes.values() for leg in (*node.queue, *node.running, *node.holding)]
        assert {id(leg) for leg in prompts} == {id(leg) for leg in self.prefills.values()}
        assert len(prompts) == len(self.prefills)
        answers = [leg for node in self.nodes.values() for leg in node.decode_legs()]
        assert {id(leg) for leg in answers} == {id(leg) for leg in self.decodes.values()}
        assert len(answers) == len(self.decodes)
        assert self.requests.keys() == self.prefills.keys() | self.decodes.keys() | self._coming
        assert sum(self._sent.values()) == len(self.requests) - len(self._coming)
        live = [node_id for node_id, node in self.nodes.items() if node.alive]
        assert list(self.roles) == live


def _work(tokens: int, cached_tokens: int, in_l1_tokens: int) -> PrefillWork:
    """Of a prompt; its last token is always computed."""
    cached = min(cached_tokens, tokens - 1)
    return PrefillWork(tokens - cached, cached, cached - min(in_l1_tokens, cached))
