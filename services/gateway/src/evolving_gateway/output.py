"""The output of one request as its client gets it: positions without gap or repeat, text, stop texts, times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evolving.v1 import gateway_pb2
from evolving_gateway.output_text import Decoder, OutputText
from evolving_gateway.token_ids import to_wire


@dataclass(frozen=True, slots=True)
class Step:
    """What some new ids lead to."""

    message: gateway_pb2.GenerateTokens | None  # to send, unless there is nothing new
    stopped: bool  # a stop text ends the output here


class Gap(Exception):
    """Ids arrived that leave a position out; the output stays as it was."""


class Output:
    """Collects ids, those resumed from an earlier call included."""

    def __init__(self, decoder: Decoder | None, stops: Sequence[str]) -> None:
        self._text = OutputText(decoder, stops)
        self.ids: list[int] = []
        self.resumed = 0
        self.first_s: float | None = None  # when the first id of this call was taken
        self.last_s = 0.0

    @property
    def text(self) -> str:
        """All text so far."""
        return self._text.text

    def resume(self, ids: Sequence[int]) -> bool:
        """Take ids that the client has already; True when they end with a stop text."""
        self.resumed = len(ids)
        for token_id in ids:
            self.ids.append(token_id)
            if self._text.push(token_id).stopped:
                return True
        return False

    def take(self, index: int, ids: Sequence[int], now_s: float) -> Step:
        """Add ids whose first has position `index`; those known already are skipped. Raises Gap."""
        position = len(self.ids)
        if index > position:
            raise Gap(f"token {index} came after token {position - 1}")
        texts: list[str] = []
        stopped = False
        added = ids[position - index :]
        if self._text.silent:
            self.ids += added
            added = ()
        for token_id in added:
            self.ids.append(token_id)
            checked = self._text.push(token_id)
            texts.append(checked.text)
            if checked.stopped:
                stopped = True
                break
        new = self.ids[position:]
        if not new:
            return Step(None, False)
        if self.first_s is None:
            self.first_s = now_s
        self.last_s = now_s
        return Step(gateway_pb2.GenerateTokens(index=position, token_ids=to_wire(new), text="".join(texts)), stopped)

    def flush(self) -> gateway_pb2.GenerateTokens | None:
        """Text that was held back, once the output is complete: a message without ids."""
        text = self._text.flush()
        return gateway_pb2.GenerateTokens(index=len(self.ids), text=text) if text else None

    def tpot_s(self) -> float:
        """Mean time per token after the first of this call; 0 with fewer than two."""
        new = len(self.ids) - self.resumed
        if self.first_s is None or new < 2:
            return 0.0
        return (self.last_s - self.first_s) / (new - 1)
