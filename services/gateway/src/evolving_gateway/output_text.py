"""Output ids to text as they come: no half character leaves, and nothing past a stop text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

_REPLACEMENT = "\ufffd"
# A character takes at most 4 bytes and a token is at least one: text that is still broken after more tokens than that
# is not waiting for a byte, it is no UTF-8.
_WAIT_TOKENS = 4


class Decoder(Protocol):
    """The part of a tokenizer used here."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids."""
        ...


class Detokenizer:
    """Text of one output, id by id. Deterministic in the ids, however they are grouped."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []  # ids whose text decides how the next ones are spelled, then those not yet out
        self._shown = 0  # leading ids of the window whose text is out

    def push(self, token_id: int) -> str:
        """The text that this id completes; empty while a character is incomplete."""
        self._window.append(token_id)
        text = self._pending_text()
        waited = len(self._window) - self._shown > _WAIT_TOKENS
        if text.endswith(_REPLACEMENT) and not waited:
            return ""
        if text or waited:  # special tokens have no text; a long row of them must not be decoded again and again
            # Ids already out stay as context for one step: some tokenizers spell a first token without its space.
            self._window = self._window[self._shown :]
            self._shown = len(self._window)
        return text

    def flush(self) -> str:
        """What is left at the end, an incomplete character as U+FFFD."""
        text = self._pending_text()
        self._shown = len(self._window)
        return text

    def _pending_text(self) -> str:
        shown = self._decoder.decode(self._window[: self._shown])
        return self._decoder.decode(self._window)[len(shown) :]


@dataclass(frozen=True, slots=True)
class Checked:
    """Text that may go out, and whether a stop text was met right after it."""

    text: str
    stopped: bool


class StopTexts:
    """Cuts a text that comes in pieces before the first of the stop texts, which may span pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> Checked:
        """Add a piece. What might be the beginning of a stop text is held back."""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            out, self._held = self._held[: min(found)], ""
            return Checked(out, True)
        keep = self._partial_length()
        out = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return Checked(out, False)

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        out, self._held = self._held, ""
        return out

    def _partial_length(self) -> int:
        """Length of the longest end of the held text that begins a stop text."""
        longest = min(len(self._held), max((len(stop) for stop in self._stops), default=1) - 1)
        for length in range(longest, 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class OutputText:
    """Detokenizer and stop texts of one output. Without a decoder all text is empty."""

    def __init__(self, decoder: Decoder | None, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decoder) if decoder else None
        self._stops = StopTexts(stops)
        self._text: list[str] = []

    @property
    def silent(self) -> bool:
        """There is no decoder: `push` has nothing to say, and is not needed."""
        return self._detokenizer is None

    @property
    def text(self) -> str:
        """All text that went out."""
        return "".join(self._text)

    def push(self, token_id: int) -> Checked:
        """The text this id lets out, and whether the output ends with it because of a stop text."""
        if self._detokenizer is None:
            return Checked("", False)
        checked = self._stops.push(self._detokenizer.push(token_id))
        self._text.append(checked.text)
        return checked

    def flush(self) -> str:
        """What was held back; call once, when the output ended without a stop text."""
        if self._detokenizer is None:
            return ""
        checked = self._stops.push(self._detokenizer.flush())
        rest = checked.text + self._stops.flush()
        self._text.append(rest)
        return rest
