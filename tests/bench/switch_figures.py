"""What was seen of role switches, as figures, and whether the bars are met. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Phase = Literal["prefill", "decode"]

SWITCHES_LEAST = {False: 50, True: 4}
"""By whether it is the quick run."""
UPSTREAM_SWITCHES_LEAST = {False: 30, True: 2}
P50_MOST_S = {"mock": 0.5, "sglang": 1.0}
LOST_MOST = 0.003


@dataclass(frozen=True, slots=True)
class Answer:
    """One request that was answered. Seconds of one monotonic clock, seen where the tokens arrive."""

    sent_s: float
    first_s: float  # the first token came
    second_s: float  # the second came: the first one that the decode node made
    prefill_s: float  # from the prefill node's taking it to its first token, by that node; 0: it does not tell
    prefill_node: str
    decode_node: str
    prompt_tokens: int
    ideal_tokens: int = 0  # of the prompt, what earlier answers had produced
    lost_by: Mapping[str, int] = field(default_factory=dict)  # of those, what was computed again, by cause
    moved: bool = False  # it was begun on other nodes than these

    @property
    def taken_s(self) -> float:
        """When the prefill node took it, at the latest. The decode node is chosen then, not before."""
        return self.first_s - self.prefill_s

    def entered_s(self, node_id: str, phase: Phase) -> float:
        """When it was in a batch of that phase on that node, at the latest; inf: it never was."""
        if self.moved or node_id != (self.prefill_node if phase == "prefill" else self.decode_node):
            return math.inf
        return self.taken_s if phase == "prefill" else self.second_s


@dataclass(frozen=True, slots=True)
class Seen:
    """What a node said of itself. Legs in a batch, and on their way into one."""

    at_s: float  # when the word came
    prefilling: int = 0
    queued: int = 0
    decoding: int = 0
    reserved: int = 0

    def batch(self, phase: Phase) -> int:
        """Legs in a batch of that phase."""
        return self.prefilling if phase == "prefill" else self.decoding

    def coming(self, phase: Phase) -> int:
        """Legs that will be."""
        return self.queued if phase == "prefill" else self.reserved


@dataclass(frozen=True, slots=True)
class Switch:
    """One node got the other role."""

    node_id: str
    phase: Phase  # the new one
    written_s: float  # when the new role was in force
    waiting: int  # requests then without the first token that the new phase gives them
    refusals: int = 0


def served_s(switch: Switch, answers: Iterable[Answer], seen: Sequence[Seen] = ()) -> float:
    """Seconds from the switch to the first request in a batch of the new role, at the latest; inf: none yet.

    Whichever tells first, requests or the node. seen: what it said, oldest first. Only requests taken after the switch
    say something, and the node only where it had nothing left of an earlier role: it finishes what it began.
    """
    after = (answer for answer in answers if answer.taken_s >= switch.written_s)
    entered_s = min((answer.entered_s(switch.node_id, switch.phase) for answer in after), default=math.inf)
    return min(entered_s, _seen_s(switch, seen)) - switch.written_s


def _seen_s(switch: Switch, seen: Sequence[Seen]) -> float:
    """When the node first said that it serves the new role."""
    before = [word for word in seen if word.at_s <= switch.written_s]
    if not before or before[-1].batch(switch.phase) or before[-1].coming(switch.phase):
        return math.inf
    return next((word.at_s for word in seen[len(before) :] if word.batch(switch.phase)), math.inf)


def switch_figures(
    switches: Sequence[Switch], answers: Sequence[Answer], seen: Mapping[str, Sequence[Seen]]
) -> dict[str, Any]:
    """Of one arm's switches. seen: what each node said, where it says anything."""
    seconds = {switch: served_s(switch, answers, seen.get(switch.node_id, ())) for switch in switches}
    return {
        "switches": len(switches),
        "seconds_p50": statistics.median(seconds.values()),
        "seconds_max": max(seconds.values()),
        **{
            f"seconds_p50_to_{phase}": statistics.median(taken)
            for phase in ("prefill", "decode")
            if (taken := [s for switch, s in seconds.items() if switch.phase == phase])
        },
        "refusals": sum(switch.refusals for switch in switches),
        "waiting_least": min(switch.waiting for switch in switches),
        "seconds": [
            {"node": switch.node_id, "to": switch.phase, "seconds": round(s, 4), "waiting": switch.waiting}
            for switch, s in seconds.items()
        ],
    }


def reuse_figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Reuse of these, as shares of their prompt tokens."""
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    lost_by: Counter[str] = Counter()
    for answer in answers:
        lost_by.update(answer.lost_by)
    share = 1.0 / max(1, prompt_tokens)
    return {
        "requests": len(answers),
        "prompt_tokens": prompt_tokens,
        "reusable": share * sum(answer.ideal_tokens for answer in answers),
        "lost_reuse": share * lost_by.total(),
        "lost_by": {cause: share * tokens for cause, tokens in sorted(lost_by.items()) if tokens},
    }


@dataclass(frozen=True, slots=True)
class Bar:
    """One thing to show."""

    name: str
    bar: str
    value: str
    met: bool

    def as_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def bars(result: Mapping[str, Any]) -> Iterator[Bar]:
    """Those of the engines that were run. Upstream has none but that it was measured: it is there to compare with."""
    for row in result["engines"]:
        name, least = row["engine"], SWITCHES_LEAST[result["quick"]]
        yield Bar(f"{name}: switches", f"≥ {least}", str(row["switches"]), row["switches"] >= least)
        yield Bar(f"{name}: one waits at each", "≥ 1", str(row["waiting_least"]), row["waiting_least"] >= 1)
        p50_s, most_s = row["seconds_p50"], P50_MOST_S[name]
        yield Bar(f"{name}: median seconds", f"< {most_s:g}", f"{p50_s:.3f}", p50_s < most_s)
        every = math.isfinite(row["seconds_max"])
        yield Bar(f"{name}: each role was served", "all", "all" if every else "not all", every)
        yield Bar(f"{name}: failed requests", "0", str(row["failed_requests"]), row["failed_requests"] == 0)
        lost = row["lost_reuse"]
        yield Bar(f"{name}: lost reuse", f"≤ {_percent(LOST_MOST)}", _percent(lost), lost <= LOST_MOST)
        yield Bar(f"{name}: restarted", "nothing", ", ".join(row["restarted"]) or "nothing", not row["restarted"])
    if "upstream" in result:
        least, made = UPSTREAM_SWITCHES_LEAST[result["quick"]], result["upstream"]["switches"]
        yield Bar("upstream: switches measured", f"≥ {least}", str(made), made >= least)


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
