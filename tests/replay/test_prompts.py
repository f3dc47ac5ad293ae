"""Token ids for block ids: the same wherever an id comes, and what was really said where a prompt goes on."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evolving_replay.prompts import BlockTokens, SessionPrompts
from evolving_sim.traces import TraceRequest

BLOCK = 4
VOCABULARY = 50


def request(ids: list[int], tail_tokens: int = 0, output_tokens: int = 1) -> TraceRequest:
    """One request of a trace; its times don't matter here."""
    return TraceRequest(0.0, len(ids) * BLOCK + tail_tokens, output_tokens, np.array(ids, dtype=np.uint32), 0.0, 0.0)


def session(seed: str = "a") -> SessionPrompts:
    return SessionPrompts(BlockTokens(seed, BLOCK, VOCABULARY))


def tokens(prompt: bytes) -> list[int]:
    return [int(each) for each in np.frombuffer(prompt, dtype="<u4")]


def packed(ids: list[int]) -> bytes:
    return np.array(ids, dtype="<u4").tobytes()


def test_the_answer_is_in_the_prompt_that_goes_on_from_it() -> None:
    prompts = session()
    first = request([1, 2], tail_tokens=3)
    asked = prompts.prompt(first, 0)
    output = [90, 91, 92, 93, 94, 95]  # no made-up token is as large
    prompts.answered(first, asked, packed(output))
    following = tokens(prompts.prompt(request([1, 2, 3, 4, 5], tail_tokens=2), 1))
    assert following[:17] == tokens(asked) + output
    assert max(following[17:]) < VOCABULARY
    assert len(following) == 22


def test_an_answer_longer_than_what_was_added_is_cut() -> None:
    prompts = session()
    first = request([1], tail_tokens=1)
    asked = prompts.prompt(first, 0)
    prompts.answered(first, asked, packed([90, 91, 92, 93, 94]))
    following = request([1, 2])
    again = prompts.prompt(following, 1)
    assert tokens(again) == [*tokens(asked), 90, 91, 92]
    prompts.answered(following, again, packed([80]))
    assert tokens(prompts.prompt(request([1, 2, 3]), 2))[8] == 80


def test_what_goes_on_from_an_older_prompt_has_that_ones_answer() -> None:
    prompts = session()
    first, aside = request([1, 2], tail_tokens=1), request([1, 7], tail_tokens=2)
    prompts.answered(first, prompts.prompt(first, 0), packed([90, 91, 92, 93]))
    prompts.answered(aside, prompts.prompt(aside, 1), packed([80, 81, 82, 83]))
    assert tokens(prompts.prompt(request([1, 2, 3]), 2))[9:12] == [90, 91, 92]
    assert tokens(prompts.prompt(request([1, 7, 8]), 3))[10:12] == [80, 81]


def test_an_unanswered_request_leaves_its_tail() -> None:
    prompts = session()
    asked = prompts.prompt(request([1], tail_tokens=3), 0)
    assert tokens(prompts.prompt(request([1, 2]), 1))[:7] == tokens(asked)


def test_a_prompt_shorter_than_a_block() -> None:
    prompts = session()
    first = request([], tail_tokens=3)
    asked = prompts.prompt(first, 0)
    assert len(tokens(asked)) == 3
    prompts.answered(first, asked, packed([90, 91]))
    assert tokens(prompts.prompt(request([5], tail_tokens=1), 1)) == [*tokens(asked), 90, 91]


def test_a_known_id_behind_a_new_one_keeps_its_tokens() -> None:
    """Ids that don't name all before them, as some traces have."""
    prompts = session()
    first = request([1])
    prompts.answered(first, prompts.prompt(first, 0), packed([90, 91, 92, 93]))
    assert tokens(prompts.prompt(request([1, 2]), 1))[BLOCK:] == [90, 91, 92, 93]
    assert tokens(prompts.prompt(request([9, 2]), 2))[BLOCK:] == [90, 91, 92, 93]


def test_only_the_seed_and_the_ids_say_which_tokens() -> None:
    wide = 1_000_000  # so that no two blocks are alike by chance
    one, same, other = (SessionPrompts(BlockTokens(seed, 64, wide)) for seed in ("a", "a", "b"))
    ids = TraceRequest(0.0, 640, 1, np.arange(10, dtype=np.uint32), 0.0, 0.0)
    made = one.prompt(ids, 0)
    assert made == same.prompt(ids, 5)
    blocks = {made[at : at + 256] for at in range(0, len(made), 256)}
    others = other.prompt(ids, 0)
    assert len(blocks) == 10
    assert not blocks & {others[at : at + 256] for at in range(0, len(others), 256)}


def test_sessions_that_share_ids_share_no_tail() -> None:
    blocks = BlockTokens("a", BLOCK, VOCABULARY * 1000)
    asked = request([1, 2], tail_tokens=3)
    one, other = (SessionPrompts(blocks).prompt(asked, number) for number in (0, 1))
    shared = 2 * BLOCK * 4
    assert one[:shared] == other[:shared]
    assert one[shared:] != other[shared:]


@given(st.data())
def test_an_id_is_the_same_tokens_wherever_it_comes(data: st.DataObject) -> None:
    """Random trees of prompts, as agents grow, rewrite and go back to them."""
    prompts = session()
    paths: list[list[int]] = [[]]
    first_sent: dict[int, list[int]] = {}
    next_id = 1
    for number in range(data.draw(st.integers(1, 8), label="requests")):
        path = data.draw(st.sampled_from(paths), label="from")
        path = path[: data.draw(st.integers(0, len(path)), label="kept")]
        new = data.draw(st.integers(0, 3), label="new")
        path = [*path, *range(next_id, next_id + new)]
        next_id += new
        paths.append(path)
        asked = request(path, data.draw(st.integers(0, BLOCK - 1), label="tail"))
        prompt = prompts.prompt(asked, number)
        sent = tokens(prompt)
        assert len(sent) == asked.input_tokens
        for index, block_id in enumerate(path):
            block = sent[index * BLOCK : (index + 1) * BLOCK]
            assert first_sent.setdefault(block_id, block) == block
        if data.draw(st.booleans(), label="answered"):
            prompts.answered(asked, prompt, packed(data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=9))))
