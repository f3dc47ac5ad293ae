"""Tokenizer, chat template, text as it comes, stop texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from evolving_gateway.errors import BadTemplate, BadTokens
from evolving_gateway.output import Gap, Output
from evolving_gateway.output_text import Detokenizer, OutputText, StopTexts
from evolving_gateway.token_ids import from_wire, to_wire
from evolving_gateway.tokens import BadModelDirectory, Message, Tokenizer

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=30)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_tokenizer.write(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer(directory)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.tokenizer.encode(text, add_special_tokens=False).ids)


async def test_a_long_text_is_tokenised_as_a_short_one(tokenizer: Tokenizer) -> None:
    text = "hi ok é " * 500
    assert list(await tokenizer.encode_text(text)) == ids_of(tokenizer, text)
    assert list(await tokenizer.encode_text("hi")) == ids_of(tokenizer, "hi")


async def test_the_template_writes_roles_and_the_generation_prompt(tokenizer: Tokenizer) -> None:
    ids = await tokenizer.encode_chat([Message("user", "hi")])
    assert list(ids) == ids_of(tokenizer, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


async def test_generated_ids_go_into_the_prompt_as_they_are(tokenizer: Tokenizer) -> None:
    generated = [*(ids_of(tokenizer, piece)[0] for piece in "hi"), ids_of(tokenizer, "<|im_end|>")[0]]
    first = await tokenizer.encode_chat([Message("user", "ok")])
    second = await tokenizer.encode_chat(
        [
            Message("user", "ok"),
            Message("assistant", "hi", np.array(generated, dtype=np.uint32)),
            Message("user", "hi"),
        ]
    )
    assert list(second[: len(first)]) == list(first), "the next turn extends this one, id for id"
    assert list(second[len(first) :]) == [
        *generated,
        *ids_of(tokenizer, "\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
    ], "the end token is not doubled"


async def test_ids_without_an_end_token_get_the_template_s(tokenizer: Tokenizer) -> None:
    cut = np.array(ids_of(tokenizer, "hi"), dtype=np.uint32)
    plain = await tokenizer.encode_chat([Message("assistant", "hi"), Message("user", "ok")])
    assert list(await tokenizer.encode_chat([Message("assistant", "?", cut), Message("user", "ok")])) == list(plain)


async def test_a_template_that_refuses_is_the_client_s_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadTemplate, match="no such role"):
        await tokenizer.encode_chat([Message("bad", "x")])


async def test_a_template_cannot_leave_its_sandbox(tmp_path: Path) -> None:
    tiny_tokenizer.write(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(BadTemplate):
        await Tokenizer(tmp_path).encode_chat([Message("user", "x")])


async def test_a_model_without_a_template_takes_no_chat(tmp_path: Path) -> None:
    tiny_tokenizer.write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    (tmp_path / "generation_config.json").unlink()
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.eos_ids == {tokenizer.tokenizer.token_to_id("<|endoftext|>")}
    with pytest.raises(BadTemplate, match="no chat template"):
        await tokenizer.encode_chat([Message("user", "x")])


def test_end_tokens_come_from_the_generation_config(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_ids == {tokenizer.tokenizer.token_to_id("<|im_end|>")}


def test_a_broken_model_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadModelDirectory, match=r"tokenizer\.json is missing"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadModelDirectory, match=r"tokenizer\.json can't be read"):
        Tokenizer(tmp_path)
    tiny_tokenizer.write(tmp_path)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(BadModelDirectory, match=r"generation_config\.json"):
        Tokenizer(tmp_path)


@given(text=TEXTS)
def test_pieces_of_text_are_whole_characters_and_make_the_whole(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(tokenizer.tokenizer)
    pieces = [detokenizer.push(token_id) for token_id in ids_of(tokenizer, text)]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) == text
    assert detokenizer.flush() == ""


@given(ids=st.lists(st.integers(0, 255), max_size=40))
def test_bytes_that_are_no_text_are_shown_in_the_end_and_not_held_for_ever(
    tokenizer: Tokenizer, ids: list[int]
) -> None:
    detokenizer = Detokenizer(tokenizer.tokenizer)
    silent = 0
    for token_id in ids:
        silent = 0 if detokenizer.push(token_id) else silent + 1
        assert silent <= 4
    detokenizer.flush()
    assert detokenizer.flush() == ""


def test_ids_without_text_are_not_decoded_again_and_again(tokenizer: Tokenizer) -> None:
    longest = 0

    class Counting:
        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return str(tokenizer.tokenizer.decode(list(ids), skip_special_tokens))

    detokenizer = Detokenizer(Counting())
    end, letter = ids_of(tokenizer, "<|im_end|>"), ids_of(tokenizer, "a")
    assert [detokenizer.push(token_id) for token_id in [*end * 100, *letter]] == [*[""] * 100, "a"]
    assert longest <= 10


def test_an_incomplete_character_is_flushed_as_a_replacement(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer.tokenizer)
    euro = ids_of(tokenizer, "€")
    assert [detokenizer.push(token_id) for token_id in euro[:2]] == ["", ""]
    assert detokenizer.flush() == "\ufffd"


@given(
    text=st.text("abc", max_size=25), stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), data=st.data()
)
def test_text_ends_before_the_first_stop_however_it_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    checker, out, stopped, at = StopTexts(stops), "", False, 0
    while at < len(text) and not stopped:
        size = data.draw(st.integers(1, 4))
        checked = checker.push(text[at : at + size])
        out, stopped, at = out + checked.text, checked.stopped, at + size
    if not stopped:
        out += checker.flush()
    ends = [found for found in (text.find(stop) for stop in stops) if found >= 0]
    assert stopped == bool(ends)
    if not ends:
        assert out == text
    else:
        assert text.startswith(out)
        assert not any(stop in out for stop in stops)


def test_what_could_begin_a_stop_text_is_held_back(tokenizer: Tokenizer) -> None:
    output = OutputText(tokenizer.tokenizer, ["END"])
    shown = [output.push(token_id).text for token_id in ids_of(tokenizer, "aENbENDc")[:7]]
    assert shown == ["a", "", "", "ENb", "", "", ""]
    assert output.text == "aENb"


@given(text=TEXTS.filter(lambda text: "stop" not in text), data=st.data())
def test_a_resumed_output_goes_on_exactly_where_the_first_call_stopped(
    tokenizer: Tokenizer, text: str, data: st.DataObject
) -> None:
    ids = ids_of(tokenizer, text)
    cut = data.draw(st.integers(0, len(ids)))
    first, second = Output(tokenizer.tokenizer, ["stop"]), Output(tokenizer.tokenizer, ["stop"])
    sent = first.take(0, ids[:cut], 0.0).message
    second.resume(ids[:cut])
    rest = second.take(cut, ids[cut:], 1.0).message
    flushed = second.flush()
    got = "".join(message.text for message in (sent, rest, flushed) if message)
    assert got == text
    assert second.ids == ids


def test_positions_known_are_skipped_and_a_gap_is_refused() -> None:
    output = Output(None, [])
    output.take(0, [1, 2], 0.0)
    step = output.take(1, [2, 3], 1.0)
    assert step.message is not None
    assert (step.message.index, step.message.token_ids) == (2, to_wire([3]))
    assert output.take(0, [1, 2, 3], 2.0).message is None
    with pytest.raises(Gap):
        output.take(4, [5], 3.0)
    assert output.ids == [1, 2, 3]
    assert output.tpot_s() == pytest.approx(0.5)


@given(ids=st.lists(st.integers(0, 99), max_size=20))
def test_ids_travel_as_little_endian_u32(ids: list[int]) -> None:
    data = to_wire(ids)
    assert data == b"".join(token_id.to_bytes(4, "little") for token_id in ids)
    assert from_wire(data, 100, "x").tolist() == ids


def test_bad_ids_are_named() -> None:
    with pytest.raises(BadTokens, match="x: 5 bytes"):
        from_wire(b"12345", 100, "x")
    with pytest.raises(BadTokens, match="id 100 at position 1"):
        from_wire(to_wire([99, 100]), 100, "x")
