"""What the tests of whole clusters share."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import DEFAULT_MODEL


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The small real model, as `make model` leaves it."""
    assert (DEFAULT_MODEL / "config.json").exists(), f"no model in {DEFAULT_MODEL}: run make model"
    return DEFAULT_MODEL
