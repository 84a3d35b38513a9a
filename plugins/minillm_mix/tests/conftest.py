"""What the tests of this distribution share: small plans, and models on NumPy away from their start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from minillm_core import ModelShape, Plan
from minillm_core.backends.bind import requests_of
from minillm_kit import GEOMETRY, small


@pytest.fixture(scope="session")
def lab() -> ModuleType:
    """Small plans and models."""
    return small


@pytest.fixture(scope="session")
def node() -> Callable[..., Any]:
    """``node(Module, argument=...)``: a module on NumPy, its parameters drawn at random."""
    return small.node


class Seen:
    """What a function of attention is given beside q, k and v."""

    @staticmethod
    def geometry(heads: int, kv_heads: int, head_dim: int, dim: int = 32) -> ModelShape:
        """The sizes of a layer."""
        return replace(GEOMETRY, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dim=dim)

    @staticmethod
    def distance(queries: int, keys: int) -> np.ndarray:
        """int32 (T, S)."""
        return (np.arange(keys - queries, keys)[:, None] - np.arange(keys)).astype(np.int32)

    def mask(self, queries: int, keys: int) -> np.ndarray:
        """bool (T, S): causal."""
        return self.distance(queries, keys) >= 0


@pytest.fixture(scope="session")
def seen() -> Seen:
    """What a function of attention is given beside q, k and v."""
    return Seen()


@pytest.fixture(scope="session")
def asked() -> Callable[[Plan], dict[str, Any]]:
    """The ops whose kernels a plan asks for, with the facts."""
    return lambda plan: {one.op: one.facts for one in requests_of(plan)}


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers, the same in every run."""
    return np.random.default_rng(4)
