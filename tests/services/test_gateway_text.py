"""Text and messages in, text out, over the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import tiny_tokenizer
from gateway_harness import Bench, bench
from scripted_nodes import bytes_ids, ids_bytes
from tokenizers import Tokenizer
from waiting import eventually

from evolving.v1 import gateway_pb2

Sampling = gateway_pb2.Sampling


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return tiny_tokenizer.write(tmp_path)


@pytest.fixture
async def it(tmp_path: Path, tokenizer: Tokenizer) -> AsyncIterator[Bench]:
    async with bench("n", tokenizer_path=tmp_path) as running:
        yield running


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


async def test_text_goes_in_and_whole_characters_come_out(it: Bench, tokenizer: Tokenizer) -> None:
    output = ids_of(tokenizer, "naïve — 漢字")
    it.nodes["n"].script.output = output
    stream = it.generate(text="hi é", sampling=Sampling(max_tokens=len(output)))
    finished = await stream.all()
    assert bytes_ids(it.nodes["n"].prefills[0].token_ids) == ids_of(tokenizer, "hi é")
    assert stream.text == finished.text == "naïve — 漢字"
    assert stream.ids == output


async def test_the_model_s_end_token_ends_the_output_and_is_no_text(it: Bench, tokenizer: Tokenizer) -> None:
    output = ids_of(tokenizer, "ok<|im_end|>never")
    it.nodes["n"].script.output = output
    chat = gateway_pb2.ChatPrompt(messages=[gateway_pb2.ChatMessage(role="user", content="hi")])
    finished = await it.generate(chat=chat).all()
    assert finished.reason == gateway_pb2.FINISH_REASON_STOP
    assert finished.text == "ok"
    end = ids_of(tokenizer, "<|im_end|>")
    assert bytes_ids(finished.output_token_ids) == [*ids_of(tokenizer, "ok"), *end]
    assert it.nodes["n"].prefills[0].sampling.stop_token_ids == end


async def test_an_output_sent_back_as_ids_extends_the_last_prompt(it: Bench, tokenizer: Tokenizer) -> None:
    it.nodes["n"].script.output = ids_of(tokenizer, "ok<|im_end|>")
    ask = gateway_pb2.ChatMessage(role="user", content="hi")
    finished = await it.generate(chat=gateway_pb2.ChatPrompt(messages=[ask])).all()
    said = gateway_pb2.ChatMessage(role="assistant", content="ok", token_ids=finished.output_token_ids)
    await it.generate(chat=gateway_pb2.ChatPrompt(messages=[ask, said, ask])).all()
    first, second = (prefill.token_ids for prefill in it.nodes["n"].prefills)
    assert second.startswith(first + finished.output_token_ids)


@pytest.mark.parametrize("tokens_a_message", [1, 3, 50])
async def test_a_stop_text_cuts_the_text_and_ends_both_legs(
    it: Bench, tokenizer: Tokenizer, tokens_a_message: int
) -> None:
    script = it.nodes["n"].script
    script.output = ids_of(tokenizer, "one STOP two " * 20)
    script.tokens_a_message = tokens_a_message
    script.pause_at = 60
    finished = await it.generate(text="x", sampling=Sampling(max_tokens=200, stop=[" ST", "two"])).all()
    assert finished.reason == gateway_pb2.FINISH_REASON_STOP
    assert finished.text == "one"
    assert bytes_ids(finished.output_token_ids) == ids_of(tokenizer, "one ST")
    await eventually(lambda: not it.nodes["n"].running)


async def test_text_held_back_for_a_stop_comes_with_the_end(it: Bench, tokenizer: Tokenizer) -> None:
    output = ids_of(tokenizer, "a ST")
    it.nodes["n"].script.output = output
    stream = it.generate(text="x", sampling=Sampling(max_tokens=len(output), stop=[" STOP"]))
    finished = await stream.all()
    assert stream.text == finished.text == "a ST"
    assert finished.reason == gateway_pb2.FINISH_REASON_LENGTH


async def test_a_resumed_call_does_not_say_text_again(it: Bench, tokenizer: Tokenizer) -> None:
    output = ids_of(tokenizer, "漢字 ok")
    it.nodes["n"].script.output = output
    stream = it.generate(
        text="x", sampling=Sampling(max_tokens=len(output)), resume_from=4, resume_token_ids=ids_bytes(output[:4])
    )
    finished = await stream.all()
    assert stream.text == "字 ok"
    assert finished.text == "漢字 ok"
    assert bytes_ids(finished.output_token_ids) == output


async def test_a_resumed_output_that_had_met_its_stop_text_is_over(it: Bench, tokenizer: Tokenizer) -> None:
    output = ids_of(tokenizer, "ab")
    stream = it.generate(
        text="x", sampling=Sampling(stop=["b"]), resume_from=len(output), resume_token_ids=ids_bytes(output)
    )
    finished = await stream.all()
    assert (finished.text, finished.reason) == ("a", gateway_pb2.FINISH_REASON_STOP)
    assert it.nodes["n"].prefills == []
