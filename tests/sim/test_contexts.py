"""Block names are equal exactly where contexts are."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from evolving.core.terms import NAME_BYTES
from evolving_sim.contexts import BlockNames

BLOCK_TOKENS = 4
Token = tuple[int, int]  # which writing made it, and where it stands
SHARES = st.sampled_from((0.0, 0.3, 0.5, 0.9, 1.0))
STEPS = st.lists(
    st.tuples(st.sampled_from(("grow", "keep", "fork")), st.integers(0, 9), st.integers(0, 30), SHARES), max_size=25
)


@settings(max_examples=200)
@given(STEPS)
def test_names_are_equal_exactly_where_contexts_are(steps: list[tuple[str, int, int, float]]) -> None:
    contexts = [BlockNames("root", BLOCK_TOKENS)]
    naive: list[list[Token]] = [[]]
    for writing, (step, which, tokens, share) in enumerate(steps):
        at = which % len(contexts)
        kept = int(share * len(naive[at]))
        if step == "grow":
            contexts[at].grow(len(naive[at]) + tokens)
            naive[at] += [(writing, place) for place in range(tokens)]
        elif step == "keep":
            contexts[at].keep(kept)
            naive[at] = naive[at][:kept]
        else:
            contexts.append(contexts[at].fork(f"fork {writing}", kept))
            naive.append(naive[at][:kept])
    for context, tokens_ in zip(contexts, naive, strict=True):
        assert context.tokens == len(tokens_)
        assert len(context.names) == len(tokens_) // BLOCK_TOKENS
        assert all(len(name) == NAME_BYTES for name in context.names)
    named = [
        (name, tuple(tokens_[: (place + 1) * BLOCK_TOKENS]))
        for context, tokens_ in zip(contexts, naive, strict=True)
        for place, name in enumerate(context.names)
    ]
    for (one_name, one), (other_name, other) in itertools.combinations(named, 2):
        assert (one_name == other_name) == (one == other)


def test_a_context_that_grows_shares_its_list_and_a_rewrite_leaves_the_old_one() -> None:
    context = BlockNames("a", BLOCK_TOKENS)
    context.grow(11)
    before, seen = context.names, list(context.names)
    context.grow(20)
    assert context.names is before
    assert before[: len(seen)] == seen
    context.keep(9)
    context.grow(20)
    assert context.names is not before
    assert len(before) == 5
    assert context.names[:2] == before[:2]
    assert not set(context.names[2:]) & set(before)


def test_names_follow_from_the_writer_alone() -> None:
    def made(writer: str) -> list[bytes]:
        context = BlockNames(writer, BLOCK_TOKENS)
        context.grow(40)
        context.keep(10)
        context.grow(40)
        return context.names

    assert made("a") == made("a")
    assert not set(made("a")) & set(made("b"))
