"""Imported by SGLang, which takes the class from here. Where there is none, it imports its own models and decides."""

from __future__ import annotations

from evolving_node_agent.engines.sglang.host.models import classes_of
from evolving_node_agent.engines.sglang.host.plugin import served_model

EntryClass = classes_of(served_model())
