"""Fixtures of this distribution: small plans, and NumPy models with perturbed parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from minillm_core import ModelShape, Plan
from minillm_core.backends.bind import requests_of
from minillm_core.backends.native import Continuation
from minillm_core.nn.node import Scope
from minillm_kit import GEOMETRY, last_logits, small


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


@pytest.fixture(scope="session")
def decoded() -> Callable[..., Iterator[dict[str, Any]]]:
    """Return ``decoded(plan, net, batch, within)``, which decodes the columns of a batch one by one.

    It yields what the cache keeps after each column, by node, and checks that the column's logits are those of
    a whole pass to within ``within``.
    """

    def decode(
        plan: Plan, net: Any, batch: Mapping[str, np.ndarray], within: float
    ) -> Iterator[dict[str, Any]]:
        logits: Any = last_logits(plan, net)
        decoding = Continuation(logits, net.geometry)
        for at in range(batch["ids"].shape[1]):
            one = {name: array[:, at : at + 1] for name, array in batch.items()}
            whole = logits({name: array[:, : at + 1] for name, array in batch.items()}, Scope)
            np.testing.assert_allclose(decoding.feed(one), whole, rtol=within, atol=within)
            yield decoding.cache.kept

    return decode
