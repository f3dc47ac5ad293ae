"""One arm: the load on a target without any switch, then with one after the other."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.switch_figures import Phase, Seen, Switch, reuse_figures, served_s, switch_figures
from bench.switch_load import POLL_S, Load, Target

START: Mapping[str, Phase] = {"node-a": "prefill", "node-b": "prefill", "node-c": "decode"}
NODES = tuple(START)
_SERVED_S = 60.0  # a role not served for so long is not waited for any more
_PAUSE_S = (0.5, 1.5)  # between a role that is served and the next switch

SwitchNode = Callable[[str, Phase, Callable[[], int]], Awaitable[Switch]]
"""Gives a node its new role; the last argument says how many requests wait for the new phase."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    agents: int
    switches: int
    warm_up: int = 40  # requests before anything is measured
    still: int = 400  # requests without a switch


def turns_of_roles() -> Iterator[tuple[str, Phase]]:
    """From START on: a node to decode, another to prefill, and so on; each node in turn, no phase ever without one."""
    roles, place = dict(START), 1
    while True:
        node = NODES[place % len(NODES)]
        roles[node] = "decode" if roles[node] == "prefill" else "prefill"
        yield node, roles[node]
        place += 1


async def measure(
    target: Target, switch_node: SwitchNode, plan: Plan, name: str, seen: Mapping[str, Sequence[Seen]]
) -> dict[str, Any]:
    """The arm's figures. seen: what nodes said of themselves, as it grows."""
    load, switches = Load(target, plan.agents), list[Switch]()
    running = asyncio.create_task(load.run())
    switching = asyncio.create_task(_switch_all(load, switch_node, plan, name, seen, switches))
    try:
        await asyncio.wait((running, switching), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running  # raises what ended it
        await switching
        load.stop()
        await running
    finally:
        for task in (running, switching):
            task.cancel()
        await asyncio.gather(running, switching, return_exceptions=True)
    begun_s = switches[0].written_s
    still = [answer for answer in load.answers[plan.warm_up :] if answer.sent_s < begun_s]
    switched = reuse_figures([answer for answer in load.answers if answer.sent_s >= begun_s])
    return {
        **switch_figures(switches, load.answers, seen),
        "agents": plan.agents,
        "failed_requests": load.failures.total(),
        "failures": dict(load.failures),
        "moved_requests": sum(answer.moved for answer in load.answers),
        **switched,
        "without_switches": reuse_figures(still),
    }


async def _switch_all(
    load: Load,
    switch_node: SwitchNode,
    plan: Plan,
    name: str,
    seen: Mapping[str, Sequence[Seen]],
    switches: list[Switch],
) -> None:
    await load.until_answered(plan.warm_up)
    await load.until_answered(plan.still)
    print(f"  {name}: {len(load.answers)} requests answered without a switch", flush=True)
    draw, roles = random.Random(4), turns_of_roles()
    for number in range(plan.switches):
        node, phase = next(roles)
        await load.until_waiting(phase)
        switch = await switch_node(node, phase, partial(load.waiting.__getitem__, phase))
        switches.append(switch)
        seconds = await _until_served(load, switch, seen.get(node, ()))
        print(f"  {name}: switch {number + 1}, {node} to {phase}: {seconds:.3f} s", flush=True)
        await asyncio.sleep(draw.uniform(*_PAUSE_S))


async def _until_served(load: Load, switch: Switch, seen: Sequence[Seen]) -> float:
    """Seconds until it was, by what is known so far; inf: it took too long."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + _SERVED_S
    while math.isinf(seconds := served_s(switch, load.answers, seen)) and loop.time() < deadline_s:
        await asyncio.sleep(POLL_S)
    return seconds
