"""A directory with nodes that hold what they are told to, and requests that go as they should: for tests that read as
stories. A block is a letter: "sys" is a context of three blocks, and equal letters after equal contexts are the same
block."""

from __future__ import annotations

from collections.abc import Iterable

from core.pair import chain, run_ref

from evolving.core.config import DirectoryConfig
from evolving.core.directory import Directory
from evolving.core.directory_types import Begin, BeginAnswer, Effect, Landed, NodeEvent, Output, Removed, Stored
from evolving.core.terms import Phase, Role, Tier

TENANT = "t"


class Cluster:
    """A directory with nodes that hold what they are told to, and requests that go as they should."""

    def __init__(self, *nodes: str, config: DirectoryConfig | None = None) -> None:
        self.directory = Directory(config)
        self.now_s = 0.0
        self.sequence = dict.fromkeys(nodes, 0)
        for node_id in nodes:
            self.directory.node_up(self.now_s, node_id, "life-1")

    def tell(self, node_id: str, *events: NodeEvent) -> list[Effect]:
        """The node's next batch."""
        self.sequence[node_id] += 1
        return self.directory.node_events(self.now_s, node_id, "life-1", self.sequence[node_id], events)

    def store(self, node_id: str, text: str, first: int = 0, tiers: Iterable[Tier] = Tier) -> list[Effect]:
        """The node holds blocks of a context from `first` on."""
        run = run_ref(chain([], text), first, len(text))
        return self.tell(node_id, *(Stored(tier, run) for tier in tiers))

    def evict(self, node_id: str, text: str, first: int = 0, tiers: Iterable[Tier] = Tier) -> list[Effect]:
        """The node lets go of blocks of a context from `first` on."""
        run = run_ref(chain([], text), first, len(text))
        return self.tell(node_id, *(Removed(tier, run) for tier in tiers))

    def begin(self, branch: str, request: str, text: str, version: int = 0, **more: str | bool | bytes) -> BeginAnswer:
        """A request of a branch, its context sent in full."""
        names = b"".join(chain([], text))
        event = Begin(TENANT, branch, request, version=version, new_names=names, **more)  # type: ignore[arg-type]
        return self.directory.begin(self.now_s, event)[0]

    def land(
        self, branch: str, request: str, node_id: str, phase: Phase, blocks: int, version: int = 1
    ) -> list[Effect]:
        """KV of a request's leading blocks is on a node."""
        return self.directory.landed(self.now_s, Landed(TENANT, branch, request, version, phase, node_id, blocks))

    def out(self, branch: str, request: str, node_id: str, text: str, first: int, version: int = 1) -> list[Effect]:
        """Output completed blocks of a context from `first` on."""
        names = b"".join(chain([], text)[first:])
        return self.directory.output(self.now_s, Output(TENANT, branch, request, version, node_id, first, names))

    def done(self, branch: str, request: str) -> list[Effect]:
        """The request is over."""
        return self.directory.request_done(self.now_s, TENANT, branch, request)

    def end(self, *branch_ids: str, subtree: bool = False) -> list[Effect]:
        """Branches end."""
        return self.directory.end(self.now_s, TENANT, branch_ids, subtree)

    def serve(
        self, branch: str, request: str, text: str, p: str = "p1", d: str = "d1", output: str = "", version: int = 0
    ) -> BeginAnswer:
        """A whole request: prefilled on `p`, decoded on `d`, its output written through to `d`'s host memory."""
        answer = self.begin(branch, request, text, version)
        for node_id, phase in ((p, Phase.PREFILL), (d, Phase.DECODE)):
            self.store(node_id, text)
            self.land(branch, request, node_id, phase, len(text), answer.version)
        if output:
            self.store(d, text + output, len(text))
            self.out(branch, request, d, text + output, len(text), answer.version)
        self.done(branch, request)
        return answer

    def counts(self, node_id: str, text: str) -> list[int]:
        """What the node evicts by, block by block of a context."""
        found = {}
        for names, count in self.directory.node_counts(node_id):
            found.update({names[at : at + 16]: count for at in range(0, len(names), 16)})
        self.directory.check_invariants()
        return [found.get(name, 0) for name in chain([], text)]

    def phase_counts(self, text: str) -> list[tuple[int, int]]:
        """(PREFILL, DECODE) counts of each block of a context, summed over nodes."""
        sums = []
        for name in chain([], text):
            view = self.directory.block(name)
            copies = view.copies if view is not None else ()
            sums.append((sum(copy.prefill_count for copy in copies), sum(copy.decode_count for copy in copies)))
        return sums

    def all_zero(self) -> bool:
        """Whether nothing is counted anywhere."""
        return not any(self.directory.node_counts(node_id) for node_id in self.sequence)

    def switch(self, node_id: str, old: Role, new: Role) -> list[Effect]:
        """A node's role changes."""
        return self.directory.role_switch(self.now_s, node_id, old, new)
