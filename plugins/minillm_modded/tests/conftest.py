"""What the tests of this distribution share: small plans, and models on NumPy away from their start."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from minillm_kit import small


@pytest.fixture(scope="session")
def lab() -> ModuleType:
    """Small plans and models."""
    return small


@pytest.fixture(scope="session")
def node() -> Callable[..., Any]:
    """``node(Module, argument=...)``: a module on NumPy, its parameters drawn at random."""
    return small.node


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers, the same in every run."""
    return np.random.default_rng(4)
