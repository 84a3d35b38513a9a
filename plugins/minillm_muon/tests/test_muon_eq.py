"""Tests of MuonEq against its formula in NumPy, with a scheduled momentum, and of its conflicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import PlanError
from minillm_kit import NumPyOps
from minillm_muon.muon import Muon, newton_schulz
from minillm_muon.muon_eq import MuonEq, equilibrated
from minillm_muon.polar_express import PolarExpress

OPS: Any = NumPyOps()
NAMES = ("layers.0.attention.k.weight", "layers.1.mlp.up.weight", "layers.1.mlp.down.weight")


def unit(x: np.ndarray, axis: int) -> np.ndarray:
    return x / np.linalg.norm(x, axis=axis, keepdims=True)


@pytest.mark.parametrize(
    ("of", "even"),
    [
        ("rows", lambda x: unit(x, 1)),
        ("columns", lambda x: unit(x, 0)),
        ("both", lambda x: unit(unit(x, 1), 0)),
    ],
)
def test_updates_are_the_formulas(
    planned: Any, drawn: Any, stepped: Any, of: Any, even: Any
) -> None:
    plan = planned({"muon": Muon(momentum_start=0.5), "muon_eq": MuonEq(of=of)})
    rng, betas = np.random.default_rng(0), (0.5, 0.7, 0.9)
    params, grads = drawn(plan, rng), [drawn(plan, rng) for _ in betas]
    (name,) = (one for one in plan.schedules if one.endswith("momentum"))
    rates = {"muon.lr": 0.02, "train.lr": 0.001}
    got, _ = stepped(plan, params, grads, [rates | {name: beta} for beta in betas])
    for name in NAMES:
        param, mean = params[name], 0.0
        for beta, grad in zip(betas, (one[name] for one in grads), strict=True):
            mean = beta * mean + (1 - beta) * grad
            ahead = even((1 - beta) * grad + beta * mean)
            (polar,), _ = newton_schulz(OPS, ahead[None], None, {}, steps=5)
            tall = max(1, param.shape[0] / param.shape[1]) ** 0.5
            param = param - 0.02 * (tall * polar + 0.1 * param)
        np.testing.assert_allclose(got[name], param, rtol=1e-9, atol=1e-12)


def test_a_row_without_a_gradient_stays_without() -> None:
    update = np.ones((1, 3, 4))
    update[:, 1] = 0.0
    held = {"momentum": np.zeros_like(update)}
    got, _ = equilibrated(OPS, update, None, held, momentum=0.9, axes=(-1, -2))
    assert np.isfinite(got).all()
    assert not got[:, 1].any()


def test_it_goes_with_another_polynomial_and_needs_muon(planned: Any) -> None:
    plan = planned({"muon": Muon(), "muon_eq": MuonEq(), "polar_express": PolarExpress()})
    assert [owner for _, owner, _ in plan.rules["muon"].stages[:2]] == ["muon_eq", "polar_express"]
    with pytest.raises(PlanError, match="--plugins muon,muon_eq"):
        planned({"muon_eq": MuonEq()})
