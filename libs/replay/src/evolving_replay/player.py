"""Plays sessions against a cluster: when they start, how they end, and the report."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Sequence

from evolving.v1 import gateway_pb2
from evolving_client import Client, EvolvingError
from evolving_replay.ideal import ProducedKv
from evolving_replay.options import Arrivals, ReplayError, ReplayOptions
from evolving_replay.prompts import BlockTokens, SessionPrompts
from evolving_replay.report import Report
from evolving_replay.session import Pace, SessionPlayer
from evolving_replay.tally import Answered, Progress, Tally
from evolving_sim.traces import TraceSession

_END_PATIENCE_S = 30.0
_END_AT_ONCE = 1000  # the API's limit


async def replay(
    sessions: Sequence[TraceSession],
    options: ReplayOptions,
    on_progress: Callable[[Progress], None] | None = None,
    stop: asyncio.Event | None = None,
    on_answer: Callable[[Answered], None] | None = None,
) -> Report:
    """Play sessions against a cluster and say what it cost.

    `on_answer` is called with each request that was answered, as it is.

    Setting `stop` ends it early: what runs is cancelled, all branches are ended, and the report is of what was played
    until then and not `complete`. Branches are ended as well when this task is cancelled.

    Raises ReplayError where sessions can't be played like this, and EvolvingError where the gateway doesn't say what it
    serves. A request that fails is counted, and its session goes on.
    """
    if options.arrivals is Arrivals.OPEN and not all(session.open_loop for session in sessions):
        raise ReplayError("this trace doesn't tell when its sessions come; play it with closed arrivals")
    async with connect(options) as client:
        player = _Player(client, options, await served_model(client, options.model), sessions, on_progress, on_answer)
        return await player.run(stop or asyncio.Event())


def connect(options: ReplayOptions) -> Client:
    """A client as the options say. Nothing is sent yet."""
    return Client(
        *options.gateways,
        token=options.token,
        model=options.model,
        timeout_s=options.request_timeout_s,
        retry=options.retry,
    )


async def served_model(client: Client, name: str) -> gateway_pb2.Model:
    """The model of this name, "": the only one. Raises ReplayError and EvolvingError."""
    models = await client.models()
    chosen = [model for model in models if name in ("", model.model)]
    if len(chosen) == 1:
        return chosen[0]
    served = ", ".join(model.model for model in models) or "none"
    raise ReplayError(f"no model {name} is served, only: {served}" if name else f"say which model; served: {served}")


class _Player:
    """One replay."""

    def __init__(
        self,
        client: Client,
        options: ReplayOptions,
        model: gateway_pb2.Model,
        sessions: Sequence[TraceSession],
        on_progress: Callable[[Progress], None] | None,
        on_answer: Callable[[Answered], None] | None,
    ) -> None:
        self._client = client
        self._options = options
        self._model = model
        self._sessions = sessions
        requests = sum(session.request_count for session in sessions)
        self._tally = Tally(requests, len(sessions), on_progress, on_answer)
        self._pace = Pace(time.monotonic(), options.compression)
        self._run_id = secrets.token_hex(6)
        self._live: set[str] = set()  # main branches of sessions that began and were not ended
        self._shared: dict[int, tuple[BlockTokens, ProducedKv]] = {}  # by block_tokens: of traces that share ids

    async def run(self, stop: asyncio.Event) -> Report:
        playing = asyncio.create_task(self._play_all())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({playing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            complete = playing.done()
        finally:
            stopping.cancel()
            playing.cancel()
            await asyncio.gather(playing, stopping, return_exceptions=True)
            wall_s = time.monotonic() - self._pace.started_s
            await self._end(list(self._live))
        if complete:
            playing.result()  # a bug is raised, not reported
        return self._tally.report(complete=complete, wall_s=wall_s)

    async def _play_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            if self._options.arrivals is Arrivals.OPEN:
                await self._play_open(group)
                return
            players = self._players(self._sessions)
            places = min(self._options.concurrency, len(self._sessions))
            for place in range(places):
                group.create_task(self._play_in_turn(players, self._options.stagger_s * place / places))

    async def _play_open(self, group: asyncio.TaskGroup) -> None:
        def comes_s(session: TraceSession) -> float:
            return session.agents[0].requests[0].at_s

        for player in self._players(sorted(self._sessions, key=comes_s)):
            await self._pace.until(comes_s(player.session))
            group.create_task(self._play(player))

    async def _play_in_turn(self, players: Iterator[SessionPlayer], starts_s: float) -> None:
        """One of the places for sessions: each that ends is replaced by the next."""
        await self._pace.until(starts_s)
        for player in players:
            await self._play(player)

    def _players(self, sessions: Sequence[TraceSession]) -> Iterator[SessionPlayer]:
        """In order, each made when its turn comes."""
        first_request = 0
        for number, session in enumerate(sessions):
            blocks, produced = self._scope(session)
            yield SessionPlayer(
                client=self._client,
                pace=self._pace,
                tally=self._tally,
                session=session,
                number=number,
                branch_id=f"replay-{self._run_id}-{number}",
                prompts=SessionPrompts(blocks),
                produced=produced,
                first_request=first_request if session.ids_shared else 0,
                open_loop=self._options.arrivals is Arrivals.OPEN,
            )
            first_request += session.request_count

    def _scope(self, session: TraceSession) -> tuple[BlockTokens, ProducedKv]:
        """Tokens and KV of the block ids that mean the same as this session's."""
        if session.ids_shared and session.block_tokens in self._shared:
            return self._shared[session.block_tokens]
        seed = f"{self._options.seed}/{'' if session.ids_shared else session.session_id}"
        blocks = BlockTokens(seed, session.block_tokens, self._model.vocabulary_tokens)
        scope = blocks, ProducedKv(self._model.block_tokens)
        if session.ids_shared:
            self._shared[session.block_tokens] = scope
        return scope

    async def _play(self, player: SessionPlayer) -> None:
        self._tally.session_started()
        self._live.add(player.branch_id)
        played = False
        try:
            await player.play()
            await self._end([player.branch_id])
            played = True
        finally:
            self._tally.session_over(played=played)

    async def _end(self, branch_ids: Sequence[str]) -> None:
        """End sessions' branches, with their sub-agents'."""
        for at in range(0, len(branch_ids), _END_AT_ONCE):
            some = branch_ids[at : at + _END_AT_ONCE]
            try:
                async with asyncio.timeout(_END_PATIENCE_S):
                    await self._client.end(some, subtree=True)
            except (EvolvingError, TimeoutError):
                self._tally.branches_not_ended += len(some)
            self._live.difference_update(some)
