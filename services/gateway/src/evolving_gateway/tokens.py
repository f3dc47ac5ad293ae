"""The model's tokenizer: text and chat messages to ids, and where an output ends.

Read from the model's directory: tokenizer.json, the chat template (chat_template.jinja, or the one in
tokenizer_config.json) and the end tokens (generation_config.json, else config.json).
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import numpy as np
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from evolving_gateway.errors import BadTemplate
from evolving_gateway.token_ids import TokenIds

# Above this many characters tokenising takes milliseconds: it then runs in a thread, beside the event loop.
_THREAD_CHARACTERS = 2_000
_THREADS = 2


class BadModelDirectory(Exception):
    """The model's directory lacks a file or one of them can't be read."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. `ids`, where given, stand in place of `content`."""

    role: str
    content: str
    ids: TokenIds | None = None


class Tokenizer:
    """Tokenizer, chat template and end tokens of one model."""

    def __init__(self, directory: Path) -> None:
        """Raises BadModelDirectory naming the file at fault."""
        self.tokenizer = _read_tokenizer(directory / "tokenizer.json")
        config = _read_json(directory / "tokenizer_config.json")
        self.eos_ids = _end_ids(directory, config, self.tokenizer)
        template = _read_template(directory, config)
        self._template = _environment().from_string(template) if template is not None else None
        self._special_texts = {
            name: _special_text(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        }
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokens")

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode_text(self, text: str) -> TokenIds:
        """Ids of plain text, with the special tokens the tokenizer puts around one (such as a leading BOS)."""
        if len(text) < _THREAD_CHARACTERS:
            return self._encode(text, special=True)
        return await self._in_thread(self._encode, text, True)

    async def encode_chat(self, messages: Sequence[Message]) -> TokenIds:
        """Ids of messages rendered with the chat template and its generation prompt. Raises BadTemplate."""
        characters = sum(len(message.content) for message in messages)
        if characters < _THREAD_CHARACTERS:
            return self._encode_chat(messages)
        return await self._in_thread(self._encode_chat, messages)

    async def _in_thread(self, function: Any, *arguments: Any) -> TokenIds:
        loop = asyncio.get_running_loop()
        ids: TokenIds = await loop.run_in_executor(self._threads, function, *arguments)
        return ids

    def _encode(self, text: str, special: bool) -> TokenIds:
        return np.array(self.tokenizer.encode(text, add_special_tokens=special).ids, dtype=np.uint32)

    def _encode_chat(self, messages: Sequence[Message]) -> TokenIds:
        """Messages that carry ids are rendered with a mark in place of their content; the text around each mark is
        tokenised by itself, as it was when the ids were generated after it."""
        mark = _unused_mark(messages)
        rendered = self._render(
            [
                {"role": message.role, "content": message.content if message.ids is None else f"{mark}{at}\ue001"}
                for at, message in enumerate(messages)
            ]
        )
        first, *rest = rendered.split(mark)
        parts = [self._encode(first, special=False)]
        for piece in rest:
            number, _, text = piece.partition("\ue001")
            ids = messages[int(number)].ids
            assert ids is not None, "only messages with ids are marked"
            after = self._encode(text, special=False)
            if ids.size and after.size and ids[-1] == after[0] and int(ids[-1]) in self.eos_ids:
                ids = ids[:-1]  # the template writes the end token anyway
            parts += [ids, after]
        return np.concatenate(parts)

    def _render(self, messages: list[dict[str, str]]) -> str:
        if self._template is None:
            raise BadTemplate("this model has no chat template; send text or token ids")
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special_texts)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise BadTemplate(f"the model's chat template refuses these messages: {error}") from error


def _unused_mark(messages: Sequence[Message]) -> str:
    """A text, from a private-use plane, that no message contains."""
    while True:
        mark = f"\ue000{secrets.token_hex(8)}:"
        if not any(mark in message.content for message in messages):
            return mark


def _environment() -> ImmutableSandboxedEnvironment:
    """The sandbox that chat templates are written for: their authors test against transformers' own."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now(UTC).strftime(pattern)
    return environment


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise BadModelDirectory(f"{path} is missing")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise BadModelDirectory(f"{path} can't be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadModelDirectory(f"{path} can't be read: {error}") from error
    if not isinstance(content, dict):
        raise BadModelDirectory(f"{path} is not a JSON object")
    return content


def _read_template(directory: Path, config: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # named templates; "default" is the one for chat
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template


def _end_ids(directory: Path, config: dict[str, Any], tokenizer: tokenizers.Tokenizer) -> frozenset[int]:
    for name in ("generation_config.json", "config.json"):
        found = _read_json(directory / name).get("eos_token_id")
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    text = _special_text(config.get("eos_token"))
    found = tokenizer.token_to_id(text) if text else None
    return frozenset() if found is None else frozenset([found])


def _special_text(entry: Any) -> str:
    """A special token's text; the config holds it plainly or as an object."""
    return str(entry.get("content", "")) if isinstance(entry, dict) else str(entry or "")
