"""Settings of the planner: each wrong one is refused by its flag, and all of them reach what decides and fits."""

from __future__ import annotations

import pytest

from evolving.core.config import Gate, PlannerConfig
from evolving.core.modes import Mode
from evolving.runtime.settings_loader import load
from evolving_planner.measures import Measures, OpenLevel
from evolving_planner.settings import PlannerSettings


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--mode", "automatic"),
        ("--gate", "none"),
        ("--initial-split", "3P"),
        ("--warm-up-s", "-1"),
        ("--warm-up-s", "nan"),
        ("--window-s", "0"),
        ("--window-s", "inf"),
        ("--window-s", "3601"),
        ("--slices", "1"),
        ("--slices-valid-least", "11"),
        ("--slice-completions-least", "0"),
        ("--evidence-windows", "0"),
        ("--evidence-windows", "25"),
        ("--gain-floor", "-0.01"),
        ("--gain-floor", "nan"),
        ("--cooldown-s", "inf"),
        ("--iteration-windows-kept", "39"),
        ("--drift-error-max", "0"),
        ("--decisions-kept", "0"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_flag(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        load(PlannerSettings, [f"{flag}={value}"], environ={})
    assert stopped.value.code == 2
    assert f"evolving-planner: {flag}:" in capsys.readouterr().err


def test_by_default_it_decides_as_the_core_does() -> None:
    settings = load(PlannerSettings, [], environ={})
    assert settings.planner_config == PlannerConfig()
    assert settings.mode is Mode.AUTO
    assert settings.first_split.shape is None


def test_the_longest_window_fits_into_what_is_kept_of_a_gateway() -> None:
    settings = load(PlannerSettings, ["--window-s=3600"], environ={})
    measures, end_s = Measures(settings.planner_config), settings.window_s
    for now_s in range(1, 3601):  # a level a second, as gateways have them
        measures.report_open("g", [OpenLevel(now_s - 1.0, float(now_s), 3.0)], now_s)
    assert [part.open_requests for part in measures.read(end_s, 0.0).slices] == pytest.approx([3.0] * settings.slices)


def test_flags_reach_what_decides_and_what_fits() -> None:
    flags = {
        "window-s": 60,
        "slices": 6,
        "slices-valid-least": 5,
        "slice-completions-least": 3,
        "gate": "paper",
        "evidence-windows": 2,
        "gain-floor": 0.02,
        "cooldown-s": 30,
        "drift-error-max": 0.2,
        "warm-up-s": 90,
        "initial-split": "2P1D",
    }
    settings = load(PlannerSettings, [f"--{flag}={value}" for flag, value in flags.items()], environ={})
    assert settings.planner_config == PlannerConfig(60.0, 6, 3, 5, Gate.PAPER, 2, 0.02, 30.0)
    assert settings.fit_config.drift_error_max == 0.2
    assert (str(settings.first_split.shape), settings.first_split.warm_up_s) == ("2P1D", 90.0)
