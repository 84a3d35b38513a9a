"""Tests of Shampoo: its roots against eigenvalues, its updates against its formulas, and their intervals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_kit import NumPyOps
from minillm_optim.shampoo import Shampoo, inverse_root

OPS = NumPyOps()


def by_eigenvalues(x: np.ndarray, damping: float) -> np.ndarray:
    damped = x + damping * max(np.linalg.norm(x), 1e-30) * np.eye(len(x))
    values, vectors = np.linalg.eigh(damped)
    return (vectors * values**-0.25) @ vectors.T


def statistic(rng: np.random.Generator, size: int, rank: int, decades: float) -> np.ndarray:
    vectors, _ = np.linalg.qr(rng.standard_normal((size, size)))
    values = np.concatenate([np.logspace(0, -decades, rank), np.zeros(size - rank)])
    return (vectors * values) @ vectors.T


FRAMEWORKS = pytest.mark.parametrize("framework", ["torch", "mlx"])


def in_float32(framework: str, x: np.ndarray, **how: Any) -> np.ndarray:
    if framework == "torch":
        torch = pytest.importorskip("torch")
        from minillm_core.backends.torch.ops import TorchOps

        given = torch.tensor(x[None], dtype=torch.float32)
        return inverse_root(TorchOps({}), given, **how)[0].numpy()
    mx = pytest.importorskip("mlx.core")
    from minillm_core.backends.mlx.ops import MLXOps

    return np.array(inverse_root(MLXOps({}), mx.array(x[None].astype(np.float32)), **how)[0])


@pytest.mark.parametrize("size", [1e-8, 1.0, 1e6])
@pytest.mark.parametrize(("rank", "decades"), [(24, 1.0), (24, 8.0), (6, 2.0), (1, 0.0)])
def test_roots_are_those_of_eigenvalues(size: float, rank: int, decades: float) -> None:
    rng = np.random.default_rng(0)
    x = np.stack([size * statistic(rng, 24, rank, decades) for _ in range(2)])
    got = inverse_root(OPS, x, damping=1e-6, iterations=30)
    for index in range(2):
        want = by_eigenvalues(x[index], 1e-6)
        assert np.linalg.norm(got[index] - want) < 1e-6 * np.linalg.norm(want)


@FRAMEWORKS
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_roots_in_float32_are_as_good_as_their_damping(framework: str, size: float) -> None:
    """The squares of the smallest and of the largest statistic are outside float32's range."""
    x = size * statistic(np.random.default_rng(1), 64, 64, 3.0)
    want = by_eigenvalues(x, 1e-6)
    found = in_float32(framework, x, damping=1e-6, iterations=30)
    assert np.linalg.norm(found - want) < 1e-3 * np.linalg.norm(want)


@FRAMEWORKS
def test_the_root_of_nothing_is_1(framework: str) -> None:
    """The statistic of a matrix without a gradient, as beside ``zero_init`` or of an idle expert."""
    found = in_float32(framework, np.zeros((8, 8)), damping=1e-5, iterations=20)
    np.testing.assert_allclose(found, np.eye(8), rtol=1e-5, atol=1e-7)


def test_a_matrix_without_gradients_stays(planned: Any, drawn: Any, stepped: Any) -> None:
    plan = planned({"shampoo": Shampoo()}, "train.weight_decay=0")
    params = drawn(plan, np.random.default_rng(0))
    still = {name: np.zeros_like(array) for name, array in params.items()}
    got, _ = stepped(plan, params, [still, still], {"shampoo.lr": 0.1, "train.lr": 0.1})
    for name, array in params.items():
        np.testing.assert_array_equal(got[name], array)


def test_before_the_first_roots_they_are_1(planned: Any, drawn: Any, stepped: Any) -> None:
    """A first step that is skipped leaves the state at 0, and the second is not due."""
    plan = planned({"shampoo": Shampoo()}, "train.weight_decay=0")
    rng = np.random.default_rng(2)
    params, grad = drawn(plan, rng), drawn(plan, rng)
    got, _ = stepped(plan, params, [grad], {"shampoo.lr": 0.1, "train.lr": 0.1}, first=2)
    for name in ("layers.0.attention.q.weight", "layers.1.mlp.down.weight"):
        g = grad[name]
        m, v = 0.1 * g / (1 - 0.9**2), 0.05 * g**2 / (1 - 0.95**2)
        size = np.linalg.norm(m / (np.sqrt(v) + 1e-8))
        want = params[name] - 0.1 * size * g / np.linalg.norm(g)
        np.testing.assert_allclose(got[name], want, rtol=1e-9, atol=1e-12)


def test_updates_are_the_papers_with_roots_of_every_second(
    planned: Any, drawn: Any, stepped: Any
) -> None:
    plan = planned({"shampoo": Shampoo(every=2, damping=1e-3)}, "train.weight_decay=0.5")
    rng = np.random.default_rng(3)
    params, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(4)]
    got, _ = stepped(plan, params, grads, {"shampoo.lr": 0.1, "train.lr": 0.1})
    assert {group.rule.name for group in plan.groups} == {"adamw", "shampoo"}
    for name in ("layers.0.attention.q.weight", "layers.1.mlp.down.weight"):
        weight, left, right, m, v = params[name], 0.0, 0.0, 0.0, 0.0
        roots: list[Any] = []
        for t, grad in enumerate((g[name] for g in grads), 1):
            left = 0.95 * left + 0.05 * grad @ grad.T
            right = 0.95 * right + 0.05 * grad.T @ grad
            m, v = 0.9 * m + 0.1 * grad, 0.95 * v + 0.05 * grad**2
            if t % 2 == 1:
                roots = [by_eigenvalues(x, 1e-3) for x in (left, right)]
            adam = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
            made = roots[0] @ m @ roots[1]
            made *= np.linalg.norm(adam) / np.linalg.norm(made)
            weight = weight - 0.1 * (made + 0.5 * weight)
        np.testing.assert_allclose(got[name], weight, rtol=1e-6, atol=1e-8)
