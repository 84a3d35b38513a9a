"""Fixtures of this distribution: small plans, and NumPy models with perturbed parameters."""

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
    """Return the helpers for small plans and models."""
    return small


@pytest.fixture(scope="session")
def node() -> Callable[..., Any]:
    """Return ``node(Module, argument=...)``: a module on NumPy with random parameters."""
    return small.node


class Seen:
    """The inputs of an attention function besides q, k and v."""

    @staticmethod
    def geometry(heads: int, kv_heads: int, head_dim: int, dim: int = 32) -> ModelShape:
        """Build the sizes of a layer."""
        return replace(GEOMETRY, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dim=dim)

    @staticmethod
    def distance(queries: int, keys: int) -> np.ndarray:
        """Return the distances int32 (T, S)."""
        return (np.arange(keys - queries, keys)[:, None] - np.arange(keys)).astype(np.int32)

    def mask(self, queries: int, keys: int) -> np.ndarray:
        """Return the causal mask bool (T, S)."""
        return self.distance(queries, keys) >= 0


@pytest.fixture(scope="session")
def seen() -> Seen:
    """Return a factory of the inputs besides q, k and v."""
    return Seen()


@pytest.fixture(scope="session")
def asked() -> Callable[[Plan], dict[str, Any]]:
    """Return the ops that a plan's kernels are requested for, with the facts."""
    return lambda plan: {one.op: one.facts for one in requests_of(plan)}


@pytest.fixture
def rng() -> np.random.Generator:
    """Return a random generator with a fixed seed."""
    return np.random.default_rng(4)
