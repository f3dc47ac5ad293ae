"""Requests that were answered, as tests of results make them."""

from __future__ import annotations

from typing import Any

from evolving_sim.legs import Request


def answered(**given: Any) -> Request:
    """A request that was sent at 1 s, taken at 2 s, had its first token at 3 s and was done at 5 s, unless told."""
    asked: dict[str, Any] = {
        "request_id": "coding 1#1",
        "kind": "coding",
        "agent_id": "coding 1",
        "branch_id": "coding 1",
        "parent_branch_id": "",
        "version": 1,
        "names": (),
        "shared_blocks": 0,
        "prompt_tokens": 1000,
        "output_tokens": 101,
        "sent_s": 1.0,
        "on_done": lambda: None,
    }
    later: dict[str, Any] = {"taken_s": 2.0, "first_token_s": 3.0, "done_s": 5.0, "cached_tokens": 0, "ideal_tokens": 0}
    request = Request(**(asked | {name: value for name, value in given.items() if name in asked}))
    for name, value in (later | {name: value for name, value in given.items() if name not in asked}).items():
        setattr(request, name, value)
    return request
