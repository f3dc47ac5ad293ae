"""Settings of the planner."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, field_validator, model_validator

from evolving.core.config import Gate, PlannerConfig
from evolving.core.errors import CoreError
from evolving.core.fit import FitConfig
from evolving.core.modes import Mode
from evolving.core.planner import SplitShape
from evolving.runtime.settings import ServiceSettings
from evolving_planner.office import FirstSplit

_CORE = PlannerConfig()
_FIT = FitConfig()


class PlannerSettings(ServiceSettings):
    """The split of a cluster: which nodes prefill and which decode."""

    service: ClassVar[str] = "planner"

    mode: Mode = Field(
        Mode.AUTO,
        description="what becomes of a decision by measured throughput: auto, it is carried out; shadow, it is "
        "recorded and changes nothing; manual, recorded too, the split is changed by operators alone",
    )
    initial_split: str = Field(
        "",
        description="shape of the first split, such as 2P1D, written once that many nodes are there; empty: half of "
        "the nodes prefill, rounded up, once there are two",
    )
    warm_up_s: float = Field(
        0.0,
        ge=0,
        le=86_400,
        description="how long the nodes that the first split needs serve both phases before it is written, so that "
        "each is measured in both, seconds",
    )
    window_s: float = Field(
        _CORE.window_s, ge=1, le=3600, description="measurements that a decision looks back on, seconds"
    )
    slices: int = Field(
        _CORE.slices, ge=2, le=100, description="slices of a window; each gives one gain per possible split"
    )
    slices_valid_least: int = Field(
        _CORE.slices_valid_least, ge=2, le=100, description="slices that must count; with fewer the split stays"
    )
    slice_completions_least: int = Field(
        _CORE.slice_completions_least,
        ge=1,
        description="finished requests known whole, below which a slice does not count",
    )
    gate: Gate = Field(
        _CORE.gate,
        description="the test a gain has to pass: paper, its mean is above twice its standard error; default, the "
        "error is widened where slices resemble their neighbours, and the gain is above --gain-floor; where one window "
        "is not sure, earlier ones count too (--evidence-windows)",
    )
    evidence_windows: int = Field(
        _CORE.evidence_windows,
        ge=1,
        le=24,
        description="windows under one split, the last included, that may count together where the last alone is not "
        "sure, at most 24; fewer have to be surer; 1: the last alone, which is all that the paper's gate counts",
    )
    gain_floor: float = Field(
        _CORE.gain_floor, ge=0, le=10, description="gain below which no switch is worth it, 0.01 being 1 %"
    )
    cooldown_s: float = Field(
        _CORE.cooldown_s,
        ge=0,
        le=86_400,
        description="time after any change of the split without a switch by throughput, seconds",
    )
    iteration_windows_kept: int = Field(
        600, ge=40, le=100_000, description="measured stretches of a node's iterations kept to fit its time model to"
    )
    drift_error_max: float = Field(
        _FIT.drift_error_max,
        gt=0,
        le=10,
        description="mean relative error of a node's time model over its newest iterations, above which it is fitted "
        "anew, where that is also more than twice the error it was fitted with",
    )
    leader_ttl_s: float = Field(
        5.0, ge=1, le=60, description="a leader that could not renew for this long has lost its office, seconds"
    )
    decisions_kept: int = Field(
        200, ge=1, le=1000, description="decisions kept in etcd with their reasons, the newest ones"
    )

    @field_validator("initial_split")
    @classmethod
    def _a_shape(cls, text: str) -> str:
        if text:
            try:
                SplitShape.parse(text)
            except CoreError as error:
                raise ValueError(str(error)) from None
        return text

    @model_validator(mode="after")
    def _enough_slices(self) -> Self:
        if self.slices_valid_least > self.slices:
            raise ValueError(f"slices_valid_least: {self.slices_valid_least} is more than --slices {self.slices}")
        return self

    @property
    def first_split(self) -> FirstSplit:
        """How the first split comes about."""
        return FirstSplit(SplitShape.parse(self.initial_split) if self.initial_split else None, self.warm_up_s)

    @property
    def planner_config(self) -> PlannerConfig:
        """How decisions are made."""
        return PlannerConfig(
            window_s=self.window_s,
            slices=self.slices,
            slice_completions_least=self.slice_completions_least,
            slices_valid_least=self.slices_valid_least,
            gate=self.gate,
            evidence_windows=self.evidence_windows,
            gain_floor=self.gain_floor,
            cooldown_s=self.cooldown_s,
        )

    @property
    def fit_config(self) -> FitConfig:
        """When a time model is fitted anew."""
        return FitConfig(drift_error_max=self.drift_error_max)
