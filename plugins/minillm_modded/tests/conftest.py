"""Fixtures of this distribution: small plans, and NumPy models with perturbed parameters."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from minillm_kit import small


@pytest.fixture(scope="session")
def lab() -> ModuleType:
    """Return the helpers for small plans and models."""
    return small


@pytest.fixture(scope="session")
def node() -> Callable[..., Any]:
    """Return ``node(Module, argument=...)``: a module on NumPy with random parameters."""
    return small.node


@pytest.fixture
def rng() -> np.random.Generator:
    """Return a random generator with a fixed seed."""
    return np.random.default_rng(4)
