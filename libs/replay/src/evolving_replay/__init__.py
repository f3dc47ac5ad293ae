"""Plays recorded agent sessions against any gateway and reports latency, reuse, and where reuse was lost."""

from evolving_replay.options import Arrivals, ReplayError, ReplayOptions
from evolving_replay.player import replay
from evolving_replay.report import Latency, NodeLoad, Report
from evolving_replay.tally import Answered, Progress

__all__ = [
    "Answered",
    "Arrivals",
    "Latency",
    "NodeLoad",
    "Progress",
    "ReplayError",
    "ReplayOptions",
    "Report",
    "replay",
]
