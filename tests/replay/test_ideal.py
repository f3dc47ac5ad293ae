"""The ideal hit rate against a model that compares whole prefixes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evolving_replay.ideal import AgentKv, ProducedKv

BLOCK = 2


class KeptPrefixes:
    """Every prefix any request computed, token by token."""

    def __init__(self) -> None:
        self.prefixes: set[tuple[int, ...]] = set()

    def reusable_tokens(self, prompt: list[int]) -> int:
        usable = range(0, len(prompt), BLOCK)  # at least the last token is computed
        return max(end for end in usable if end == 0 or tuple(prompt[:end]) in self.prefixes)

    def finished(self, prompt: list[int], output: list[int]) -> None:
        computed = [*prompt, *output][:-1]  # the token sampled last is not
        self.prefixes.update(tuple(computed[:end]) for end in range(1, len(computed) + 1))


def packed(ids: list[int]) -> bytes:
    return np.array(ids, dtype="<u4").tobytes()


@given(st.data())
def test_it_is_the_longest_prefix_ever_computed(data: st.DataObject) -> None:
    produced, model = ProducedKv(BLOCK), KeptPrefixes()
    agents = [AgentKv(produced) for _ in range(2)]
    said: list[list[int]] = [[]]
    few = st.lists(st.integers(0, 1), max_size=5)
    for _ in range(data.draw(st.integers(1, 12), label="requests")):
        agent = data.draw(st.sampled_from(agents))
        before = data.draw(st.sampled_from(said), label="from")
        prompt = [*before[: data.draw(st.integers(0, len(before)), label="kept")], *data.draw(few, label="new"), 1]
        assert agent.reusable_tokens(packed(prompt)) == model.reusable_tokens(prompt)
        if data.draw(st.booleans(), label="answered"):
            output = [*data.draw(few, label="output"), 0]
            agent.finished(packed(prompt), packed(output))
            model.finished(prompt, output)
            said.append([*prompt, *output])
        said.append(prompt)
    blocks = {prefix for prefix in model.prefixes if len(prefix) % BLOCK == 0}
    assert len(produced) == len(blocks), "each block once"
