"""Fixtures of this distribution: a small plan, and steps of its update in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minillm_kit import stepping


@pytest.fixture(scope="session")
def planned() -> Callable[..., Any]:
    """Return ``planned({"muon": Muon()}, "train.lr=1")``: a model with square, wide and tall matrices."""
    return stepping.plan


@pytest.fixture(scope="session")
def drawn() -> Callable[..., Any]:
    """Return ``drawn(plan, rng)``: a random array for every parameter."""
    return stepping.drawn


@pytest.fixture(scope="session")
def stepped() -> Callable[..., Any]:
    """Return a function that applies one update per gradient, in float64: parameters and state."""
    return stepping.stepped
