"""Tests of SOAP: its bases against eigenvectors, its updates against its formulas, and equality with AdamW."""

from __future__ import annotations

from typing import Any

import numpy as np

from minillm_kit import NumPyOps
from minillm_optim.soap import SOAP, turned

OPS = NumPyOps()


def test_bases_go_to_the_eigenvectors_largest_first() -> None:
    rng = np.random.default_rng(0)
    vectors, _ = np.linalg.qr(rng.standard_normal((12, 12)))
    values = 2.0 ** -np.arange(12)
    x = ((vectors * values) @ vectors.T)[None]
    basis = np.eye(12)[None]
    for _ in range(200):
        basis = turned(OPS, x, basis, 1e-6)
    np.testing.assert_allclose(basis[0].T @ basis[0], np.eye(12), atol=1e-12)
    np.testing.assert_allclose(np.diag(basis[0].T @ x[0] @ basis[0]), values, rtol=1e-6)
    np.testing.assert_allclose(np.abs(np.sum(basis[0] * vectors, 0)), np.ones(12), rtol=1e-6)


def test_a_statistic_of_nothing_turns_nothing() -> None:
    basis = np.eye(5)[None]
    np.testing.assert_allclose(turned(OPS, np.zeros((1, 5, 5)), basis, 1e-3), basis, atol=1e-12)


def adam(g: np.ndarray, m: Any, v: Any, t: int, p: Any, q: Any) -> tuple[np.ndarray, Any, Any]:
    """Compute AdamW's update in a basis, betas 0.95, one matrix."""
    m, v = 0.95 * m + 0.05 * g, 0.95 * v + 0.05 * (p.T @ g @ q) ** 2
    root = np.sqrt(v / (1 - 0.95**t))
    inner = (p.T @ (m / (1 - 0.95**t)) @ q) / (root + 1e-8 + 1e-4 * root.max())
    return p @ inner @ q.T, m, v


def turn(x: np.ndarray, basis: np.ndarray) -> np.ndarray:
    q, r = np.linalg.qr((x + 1e-3 * np.linalg.norm(x) * np.eye(len(x))) @ basis)
    return q * np.where(np.diag(r) < 0, -1, 1)


def test_updates_are_the_papers_with_bases_of_every_second(
    planned: Any, drawn: Any, stepped: Any
) -> None:
    plan = planned({"soap": SOAP(every=2)}, "train.weight_decay=0.5")
    rng = np.random.default_rng(3)
    params, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(4)]
    got, _ = stepped(plan, params, grads, {"soap.lr": 0.1, "train.lr": 0.1})
    assert {group.rule.name for group in plan.groups} == {"adamw", "soap"}
    for name in ("layers.0.attention.q.weight", "layers.1.mlp.down.weight"):
        weight = params[name]
        left, right, m, v = 0.0, 0.0, 0.0, 0.0
        p, q = (np.eye(size) for size in weight.shape)
        for t, grad in enumerate((g[name] for g in grads), 1):
            left, right = 0.95 * left + 0.05 * grad @ grad.T, 0.95 * right + 0.05 * grad.T @ grad
            if t % 2 == 1:
                p, q = turn(left, p), turn(right, q)
            update, m, v = adam(grad, m, v, t, p, q)
            weight = weight - 0.1 * (update + 0.5 * weight)
        np.testing.assert_allclose(got[name], weight, rtol=1e-7, atol=1e-9)


def test_until_the_bases_are_next_due_a_branch_has_adams_updates(
    planned: Any, drawn: Any, stepped: Any
) -> None:
    """A run that branches to SOAP after 4 updates begins with a state of 0, and bases are due at the 11th."""
    plan = planned({"soap": SOAP()}, "train.weight_decay=0.5")
    rng = np.random.default_rng(4)
    params, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(2)]
    got, _ = stepped(plan, params, grads, {"soap.lr": 0.1, "train.lr": 0.1}, first=5)
    name = "layers.1.mlp.down.weight"
    weight, m, v = params[name], 0.0, 0.0
    p, q = (np.eye(size) for size in weight.shape)
    for t, grad in enumerate((g[name] for g in grads), 5):
        update, m, v = adam(grad, m, v, t, p, q)
        weight = weight - 0.1 * (update + 0.5 * weight)
    np.testing.assert_allclose(got[name], weight, rtol=1e-9, atol=1e-12)


def test_a_matrix_without_gradients_stays(planned: Any, drawn: Any, stepped: Any) -> None:
    plan = planned({"soap": SOAP()}, "train.weight_decay=0")
    params = drawn(plan, np.random.default_rng(0))
    still = {name: np.zeros_like(array) for name, array in params.items()}
    got, _ = stepped(plan, params, [still, still], {"soap.lr": 0.1, "train.lr": 0.1})
    for name, array in params.items():
        np.testing.assert_array_equal(got[name], array)
