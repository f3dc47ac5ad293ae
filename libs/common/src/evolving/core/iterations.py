"""What the iterations of a node worked on and how long they took, summed by kind (paper, section 4.2).

Every feature of equations 1 and 2 is linear, so sums over a window are all a fit needs: an engine adds up everything
since its start, and whoever reads that cuts it into windows by subtraction. A status that gets lost loses nothing.
Everything here is pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from evolving.core.timemodel import DecodeCoefficients, PrefillSums

# The first iterations of either phase pay for what later ones find ready: lazily built kernels, first allocations.
COLD_ITERATIONS = 8


@dataclass(frozen=True, slots=True)
class IterationSums:
    """Sums over iterations of one kind."""

    iterations: int = 0
    busy_s: float = 0.0  # wall time the iterations took
    prefill: PrefillSums = field(default_factory=PrefillSums)
    requests: int = 0  # ΣB: requests that decoded
    expert_share: float = 0.0  # Σφ(B); a φ of mean B would be another value. 0 for a dense model
    context_tokens: int = 0  # Σcontext of the requests that decoded, the token fed included

    def minus(self, earlier: IterationSums) -> IterationSums:
        """What came on top of `earlier`, sums since the same start."""
        return IterationSums(
            iterations=self.iterations - earlier.iterations,
            busy_s=self.busy_s - earlier.busy_s,
            prefill=PrefillSums(
                uncached_tokens=self.prefill.uncached_tokens - earlier.prefill.uncached_tokens,
                query_key_pairs=self.prefill.query_key_pairs - earlier.prefill.query_key_pairs,
                restored_tokens=self.prefill.restored_tokens - earlier.prefill.restored_tokens,
                cached_tokens=self.prefill.cached_tokens - earlier.prefill.cached_tokens,
            ),
            requests=self.requests - earlier.requests,
            expert_share=self.expert_share - earlier.expert_share,
            context_tokens=self.context_tokens - earlier.context_tokens,
        )


@dataclass(frozen=True, slots=True)
class IterationWindow:
    """Iterations of one stretch of time, by kind; an iteration belongs to the stretch it ended in."""

    prefill: IterationSums = field(default_factory=IterationSums)  # computed prompts only
    decode: IterationSums = field(default_factory=IterationSums)  # decoded only
    mixed: IterationSums = field(default_factory=IterationSums)  # did both in one forward pass; no rows of a fit
    cold_iterations: int = 0  # in none of the sums: the first ones of the engine's life

    def reaches(self, earlier: IterationWindow) -> bool:
        """Whether no kind of iteration was counted less often than in `earlier`: between totals of one life of an
        engine, whether these are the later ones."""
        return (
            self.prefill.iterations >= earlier.prefill.iterations
            and self.decode.iterations >= earlier.decode.iterations
            and self.mixed.iterations >= earlier.mixed.iterations
            and self.cold_iterations >= earlier.cold_iterations
        )

    def since(self, earlier: IterationWindow) -> IterationWindow:
        """The window from `earlier` to here, both being sums since the same start."""
        return IterationWindow(
            prefill=self.prefill.minus(earlier.prefill),
            decode=self.decode.minus(earlier.decode),
            mixed=self.mixed.minus(earlier.mixed),
            cold_iterations=self.cold_iterations - earlier.cold_iterations,
        )


@dataclass(slots=True)
class _Running:
    """`IterationSums` that grow."""

    iterations: int = 0
    busy_s: float = 0.0
    uncached_tokens: float = 0.0
    query_key_pairs: float = 0.0
    restored_tokens: float = 0.0
    cached_tokens: float = 0.0
    requests: int = 0
    expert_share: float = 0.0
    context_tokens: int = 0

    def sums(self) -> IterationSums:
        prefill = PrefillSums(self.uncached_tokens, self.query_key_pairs, self.restored_tokens, self.cached_tokens)
        decode = (self.requests, self.expert_share, self.context_tokens)
        return IterationSums(self.iterations, self.busy_s, prefill, *decode)


@dataclass(slots=True)
class IterationMeter:
    """Adds up the iterations of one life of an engine. `experts_per_token` of `experts` a token is routed to; 0: dense.

    The first COLD_ITERATIONS of either phase only count as cold.
    """

    experts: int = 0
    experts_per_token: int = 0
    _prefill: _Running = field(init=False, default_factory=_Running)
    _decode: _Running = field(init=False, default_factory=_Running)
    _mixed: _Running = field(init=False, default_factory=_Running)
    _prefills: int = field(init=False, default=0)  # iterations that computed prompts, cold ones included
    _decodes: int = field(init=False, default=0)
    _cold: int = field(init=False, default=0)

    def add(
        self, busy_s: float, prefill: PrefillSums | None = None, requests: int = 0, context_tokens: int = 0
    ) -> None:
        """One iteration that took `busy_s`: `prefill` of the prompts it computed (None: it computed none), `requests`
        it decoded, whose contexts sum to `context_tokens`."""
        assert prefill is not None or requests > 0, "an iteration does something"
        self._prefills += prefill is not None
        self._decodes += requests > 0
        cold_prefill = prefill is not None and self._prefills <= COLD_ITERATIONS
        if cold_prefill or (requests > 0 and self._decodes <= COLD_ITERATIONS):
            self._cold += 1
            return
        sums = self._decode if prefill is None else self._mixed if requests else self._prefill
        sums.iterations += 1
        sums.busy_s += busy_s
        if prefill is not None:
            sums.uncached_tokens += prefill.uncached_tokens
            sums.query_key_pairs += prefill.query_key_pairs
            sums.restored_tokens += prefill.restored_tokens
            sums.cached_tokens += prefill.cached_tokens
        if requests:
            sums.requests += requests
            sums.expert_share += self._expert_share(requests)
            sums.context_tokens += context_tokens

    def totals(self) -> IterationWindow:
        """Everything since the start."""
        kinds = (self._prefill.sums(), self._decode.sums(), self._mixed.sums())
        return IterationWindow(*kinds, self._cold)

    def _expert_share(self, requests: int) -> float:
        routed = DecodeCoefficients(0.0, 0.0, 0.0, experts_per_token=self.experts_per_token, experts=self.experts)
        return routed.expert_share(requests)


class WindowCutter:
    """Cuts the totals that an engine reports into windows of at least `window_s`, at the reports that complete them.

    The windows of a life, with the rest at its end, add up to the newest of its totals.
    """

    def __init__(self, window_s: float) -> None:
        """Raises ValueError unless `window_s` is positive."""
        if not window_s > 0:
            raise ValueError(f"window_s must be positive, got {window_s}")
        self._window_s = window_s
        self._incarnation = ""
        self._began_s = 0.0
        self._before = IterationWindow()  # what windows were cut from already
        self._newest = IterationWindow()

    def add(self, now_s: float, incarnation: str, totals: IterationWindow) -> IterationWindow | None:
        """Take a report of an engine's life `incarnation`; the window that it completes, if it does.

        The first report of another life begins its first window. Totals behind those of an earlier report of the same
        life are old news and say nothing. A window in which nothing ran is empty, not left out.
        """
        if incarnation != self._incarnation:
            self._incarnation, self._began_s = incarnation, now_s
            self._before = self._newest = IterationWindow()
        if totals.reaches(self._newest):
            self._newest = totals
        return self._cut(now_s) if now_s - self._began_s >= self._window_s else None

    def rest(self, now_s: float) -> IterationWindow:
        """What was reported and is in no window yet, however short; the next window begins here."""
        return self._cut(now_s)

    def _cut(self, now_s: float) -> IterationWindow:
        window = self._newest.since(self._before)
        self._began_s, self._before = now_s, self._newest
        return window


@dataclass(frozen=True, slots=True)
class Mix:
    """What the mix of work decides, and so is measured anew after the coefficients are fixed. None: not observed."""

    new_tokens_per_iteration: float | None  # ū
    restored_share: float | None  # ρ: of the reused tokens of prompts, those that came from host memory


def measure_mix(windows: Iterable[IterationWindow]) -> Mix:
    """ū and ρ over `windows`."""
    iterations, new_tokens, restored, reused = 0, 0.0, 0.0, 0.0
    for window in windows:
        for sums in (window.prefill, window.mixed):
            iterations += sums.iterations
            new_tokens += sums.prefill.uncached_tokens
            restored += sums.prefill.restored_tokens
            reused += sums.prefill.cached_tokens
    return Mix(
        new_tokens_per_iteration=new_tokens / iterations if iterations else None,
        restored_share=min(1.0, restored / reused) if reused else None,
    )
