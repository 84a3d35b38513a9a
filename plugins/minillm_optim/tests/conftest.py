"""What the tests of this distribution share: a small plan, and steps of its update in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minillm_kit import stepping


@pytest.fixture(scope="session")
def planned() -> Callable[..., Any]:
    """``planned({"muon": Muon()}, "train.lr=1")``: a model of square, wide and tall matrices."""
    return stepping.plan


@pytest.fixture(scope="session")
def drawn() -> Callable[..., Any]:
    """``drawn(plan, rng)``: an array for every parameter."""
    return stepping.drawn


@pytest.fixture(scope="session")
def stepped() -> Callable[..., Any]:
    """Parameters and state after one update for each of the gradients, in float64."""
    return stepping.stepped
