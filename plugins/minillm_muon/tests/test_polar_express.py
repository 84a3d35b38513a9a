"""Tests of Polar Express against the paper's algorithm, and of its singular values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core import PlanError
from minillm_kit import NumPyOps
from minillm_muon.muon import Muon
from minillm_muon.polar_express import COEFFICIENTS, SAFETY, PolarExpress, polar_express

OPS: Any = NumPyOps()


def odd(coefficients: Any, x: Any) -> Any:
    a, b, c = coefficients
    return a * x + b * x**3 + c * x**5


def best_quintic(low: float, high: float) -> np.ndarray:
    """Find by Remez exchange the odd quintic with the least worst-case distance from 1 on [low, high]."""
    inner = np.array([(3 * low + high) / 4, (low + 3 * high) / 4])
    for _ in range(100):
        points = np.array([low, *inner, high])
        system = np.stack([points, points**3, points**5, [1, -1, 1, -1]], 1)  # errors alternate
        a, b, c, _ = np.linalg.solve(system, np.ones(4))
        turning = np.sqrt(9 * b * b - 20 * a * c) * np.array([-1, 1])
        inner = np.sqrt((-3 * b - turning[::-1]) / (10 * c))
        inner.sort()
    return np.array([a, b, c])


def papers(low: float, cushion: float, stretch: float, steps: int) -> list[np.ndarray]:
    """Run Algorithm 1: each step's interval is the image of the previous one, symmetric about 1."""
    high, found = 1.0, []
    for step in range(steps):
        one = best_quintic(max(low, cushion * high), high)
        if cushion * high > low:  # centred about 1 on the whole interval
            one *= 2 / (odd(one, low) + odd(one, high))
        if step < steps - 1:
            one /= stretch ** np.array([1, 3, 5])
        found.append(one)
        low = odd(one, low)
        high = 2 - low
    return found


def test_coefficients_are_the_papers_algorithm() -> None:
    want = papers(1e-3, cushion=0.02, stretch=1 + SAFETY, steps=5)
    np.testing.assert_allclose(COEFFICIENTS, want, rtol=1e-12)


def five(stack: np.ndarray, steps: int = 5) -> np.ndarray:
    return polar_express(OPS, stack, None, {}, steps=steps)[0]


@given(
    seed=st.integers(0, 2**32),
    values=st.lists(st.floats(0.003, 1), min_size=1, max_size=8),
    extra=st.integers(0, 6),
    size=st.floats(1e-2, 1e3),
    turned=st.booleans(),
)
def test_singular_values_come_nearer_to_one_than_newton_schulz_brings_them(
    seed: int, values: list[float], extra: int, size: float, turned: bool
) -> None:
    rng = np.random.default_rng(seed)
    u, _ = np.linalg.qr(rng.standard_normal((len(values) + extra, len(values))))
    v, _ = np.linalg.qr(rng.standard_normal((len(values), len(values))))
    matrix = size * u @ np.diag(values) @ v.T
    update = five((matrix.T if turned else matrix)[None])[0]
    found = np.linalg.svd(update, compute_uv=False)
    assert found.min() > 0.85
    assert found.max() < 1.15
    polar = u @ v.T
    assert np.sum((polar.T if turned else polar) * update) > 0.85 * len(values)


@pytest.mark.parametrize("steps", [1, 3, 5, 8])
def test_singular_values_follow_the_polynomials(steps: int) -> None:
    rng = np.random.default_rng(1)
    matrix = rng.standard_normal((4, 7))
    values = np.linalg.svd(matrix, compute_uv=False)
    want = values / (np.linalg.norm(matrix) * (1 + SAFETY) + 1e-6)
    for step in range(steps):
        want = odd(COEFFICIENTS[min(step, 4)], want)
    found = np.linalg.svd(five(matrix[None], steps)[0], compute_uv=False)
    np.testing.assert_allclose(found, np.sort(want)[::-1], rtol=1e-9)


def test_no_gradient_is_no_update() -> None:
    assert not five(np.zeros((2, 3, 4))).any()


def test_it_takes_the_place_of_newton_schulz_with_as_many_steps(planned: Any) -> None:
    plan = planned({"muon": Muon(steps=3), "polar_express": PolarExpress()})
    held = {anchor: (owner, one) for anchor, owner, one in plan.rules["muon"].stages}
    owner, one = held["orthogonalise"]
    assert (owner, dict(one.arguments)) == ("polar_express", {"steps": 3})
    assert one.reference.endswith(":polar_express")


def test_it_needs_muon(planned: Any) -> None:
    with pytest.raises(PlanError, match="builds on the rule 'muon'"):
        planned({"polar_express": PolarExpress()})
