"""How long iterations take here: as configured, until a planner says what it fitted to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

from evolving.core.errors import InvalidArgument
from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients
from evolving.runtime.log import get_logger
from evolving.wire.timemodel import decode_from_proto, prefill_from_proto

_log = get_logger(__name__)


class TimeModel:
    """Of all lives of a node's engine. What was said last stays, whatever becomes of who said it."""

    def __init__(self, prefill: PrefillCoefficients, decode: DecodeCoefficients) -> None:
        self.configured_prefill = prefill
        self.configured_decode = decode
        self._fitted_prefill: PrefillCoefficients | None = None
        self._fitted_decode: DecodeCoefficients | None = None
        self._heard: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())

    @property
    def prefill(self) -> PrefillCoefficients:
        """Equation 1, in force."""
        return self._fitted_prefill or self.configured_prefill

    @property
    def decode(self) -> DecodeCoefficients:
        """Equation 2, in force."""
        return self._fitted_decode or self.configured_decode

    @property
    def fitted_prefill_s(self) -> tuple[float, ...]:
        """c0..c4; empty: as configured."""
        return astuple(self._fitted_prefill) if self._fitted_prefill is not None else ()

    @property
    def fitted_decode_s(self) -> tuple[float, ...]:
        """d0..d3; empty: as configured."""
        return astuple(self._fitted_decode)[:4] if self._fitted_decode is not None else ()

    def adopt(
        self, prefill_s: Sequence[float], decode_s: Sequence[float], experts_per_token: int = 0, experts: int = 0
    ) -> bool:
        """Take what a planner says of either phase; whether anything changed. One of which it says nothing stays as it
        is, and so does one of which it says what can't be."""
        heard = (tuple(prefill_s), tuple(decode_s))
        if heard == self._heard:
            return False
        self._heard = heard
        before = (self.prefill, self.decode)
        try:
            if prefill_s:
                self._fitted_prefill = prefill_from_proto(prefill_s)
        except InvalidArgument as error:
            _log.warning("time_model_ignored", phase="prefill", error=str(error))
        try:
            if decode_s:
                self._fitted_decode = decode_from_proto(decode_s, experts_per_token, experts)
        except InvalidArgument as error:
            _log.warning("time_model_ignored", phase="decode", error=str(error))
        changed = (self.prefill, self.decode) != before
        if changed:
            _log.info("time_model", prefill=self.fitted_prefill_s, decode=self.fitted_decode_s)
        return changed
