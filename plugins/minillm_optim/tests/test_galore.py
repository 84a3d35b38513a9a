"""Tests of GaLore against the paper's formulas in NumPy, of its projections against the SVD, and of its state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import PlanError
from minillm_kit import NumPyOps
from minillm_muon.muon import Muon
from minillm_optim.galore import GaLore, eye, turned_to

OPS: Any = NumPyOps()
RATES = {"galore.lr": 0.1, "train.lr": 0.1}


def test_projections_go_to_the_largest_singular_vectors() -> None:
    rng = np.random.default_rng(0)
    u, _ = np.linalg.qr(rng.standard_normal((8, 8)))
    v, _ = np.linalg.qr(rng.standard_normal((20, 8)))
    g = (u * 2.0 ** -np.arange(8)) @ v.T
    basis = turned_to(OPS, g[None], eye(OPS, 8, 3), iterations=60, damping=1e-6)[0]
    np.testing.assert_allclose(basis.T @ basis, np.eye(3), atol=1e-12)
    left, _, _ = np.linalg.svd(g)
    np.testing.assert_allclose(np.abs(np.sum(basis * left[:, :3], 0)), np.ones(3), rtol=1e-8)


def test_a_gradient_of_nothing_turns_nothing() -> None:
    basis = eye(OPS, 5, 2)
    got = turned_to(OPS, np.zeros((1, 5, 7)), basis, iterations=2, damping=1e-3)
    np.testing.assert_allclose(got, basis, atol=1e-12)


def by_hand(weight: np.ndarray, grads: list[np.ndarray], rank: int, every: int) -> np.ndarray:
    """Update one matrix: two iterations, damping 1e-3, betas 0.9 and 0.999, scale 0.25, decay 0.5."""
    tall = weight.shape[0] > weight.shape[1]
    p, m, v = np.eye(min(weight.shape))[:, :rank], 0.0, 0.0
    for t, grad in enumerate(grads, 1):
        g = grad.T if tall else grad
        if (t - 1) % every == 0:
            for _ in range(2):
                q, r = np.linalg.qr(g @ g.T @ p + 1e-3 * np.sum(g * g) * p)
                p = q * np.where(np.diag(r) < 0, -1, 1)
        low = p.T @ g
        m, v = 0.9 * m + 0.1 * low, 0.999 * v + 0.001 * low**2
        root = np.sqrt(v / (1 - 0.999**t))
        u = 0.25 * p @ (m / (1 - 0.9**t) / (root + 1e-8 + 1e-4 * root.max()))
        weight = weight - 0.1 * ((u.T if tall else u) + 0.5 * weight)
    return weight


@pytest.mark.parametrize(("rank", "every"), [(3, 2), (3, 1), (64, 3)])
def test_updates_are_the_papers(
    planned: Any, drawn: Any, stepped: Any, rank: int, every: int
) -> None:
    plan = planned({"galore": GaLore(rank=rank, every=every)}, "train.weight_decay=0.5")
    rng = np.random.default_rng(1)
    params, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(5)]
    got, state = stepped(plan, params, grads, RATES)
    for name in (
        "layers.0.attention.q.weight",
        "layers.1.mlp.down.weight",
        "layers.0.mlp.up.weight",
    ):
        want = by_hand(params[name], [one[name] for one in grads], rank, every)
        np.testing.assert_allclose(got[name], want, rtol=1e-7, atol=1e-9)
    shapes = {
        entry: {
            one["precondition"][entry].shape[1:]
            for one in state.values()
            if "basis" in one["precondition"]
        }
        for entry in ("mean", "square", "basis")
    }
    k = min(rank, 8), min(rank, 16)  # keys and values are (8, 16)
    assert shapes["mean"] == shapes["square"] == {(k[0], 16), (k[1], 16), (k[1], 40)}
    assert shapes["basis"] == {(8, k[0]), (16, k[1])}


def test_a_resume_between_projections_is_exact(planned: Any, drawn: Any, stepped: Any) -> None:
    plan = planned({"galore": GaLore(rank=4, every=3)})
    rng = np.random.default_rng(2)
    params, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(6)]
    want, _ = stepped(plan, params, grads, RATES)
    middle, state = stepped(plan, params, grads[:2], RATES)
    got, _ = stepped(plan, middle, grads[2:], RATES, state=state, first=3)
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array)


def test_before_the_first_projection_it_is_the_first_columns_of_1(
    planned: Any, drawn: Any, stepped: Any
) -> None:
    """A first step that is skipped leaves the state at 0, and the second is not due."""
    plan = planned({"galore": GaLore(rank=4)}, "train.weight_decay=0")
    rng, name = np.random.default_rng(3), "layers.0.attention.q.weight"
    params, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(2)]
    got, state = stepped(plan, params, grads, RATES, first=2)
    assert (got[name][:4] != params[name][:4]).all()
    np.testing.assert_array_equal(got[name][4:], params[name][4:])
    bases = [
        one["precondition"]["basis"] for one in state.values() if "basis" in one["precondition"]
    ]
    for basis in bases:
        np.testing.assert_array_equal(
            basis, np.broadcast_to(eye(OPS, *basis.shape[1:]), basis.shape)
        )


def test_a_matrix_has_one_rule(planned: Any) -> None:
    with pytest.raises(PlanError, match="claimed by both 'galore' and 'muon'"):
        planned({"galore": GaLore(), "muon": Muon()})
