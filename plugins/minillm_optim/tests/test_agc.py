"""Tests of adaptive clipping against its formula, before AdamW and Muon, on every framework."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import PlanError
from minillm_kit import NumPyOps
from minillm_muon.muon import Muon
from minillm_optim.agc import AGC, clip_units
from minillm_optim.lion import Lion


def by_hand(grad: np.ndarray, weight: np.ndarray, clipping: float, epsilon: float) -> np.ndarray:
    """Clip unit by unit, as in the paper."""
    found = np.empty_like(grad)
    for place in np.ndindex(grad.shape[:-1]):
        size = np.linalg.norm(grad[place])
        most = clipping * max(np.linalg.norm(weight[place]), epsilon)
        found[place] = grad[place] * (most / size if size > most else 1.0)
    return found


@pytest.mark.parametrize("shape", [(5,), (4, 7), (3, 4, 7)])
def test_units_are_clipped_by_their_own_norm(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    grad = rng.standard_normal(shape) * np.exp(rng.standard_normal((*shape[:-1], 1)))
    weight = rng.standard_normal(shape)
    grad[..., :1], weight[:1] = 0.0, 0.0  # units of zeros, and weights without gradient
    got, state = clip_units(NumPyOps(), grad, weight, {}, clipping=0.5, epsilon=1e-3)
    np.testing.assert_allclose(got, by_hand(grad, weight, 0.5, 1e-3), rtol=1e-12)
    assert state == {}
    still, _ = clip_units(NumPyOps(), grad * 0, weight, {}, clipping=0.5, epsilon=1e-3)
    np.testing.assert_array_equal(still, grad * 0)


def test_the_rule_is_given_clipped_gradients(planned: Any, drawn: Any, stepped: Any) -> None:
    plugins = {"lion": Lion(lr=0.1), "agc": AGC(clipping=0.1)}
    plain, clipped = planned({"lion": plugins["lion"]}), planned(plugins)
    rng = np.random.default_rng(1)
    params, grads = drawn(plain, rng), drawn(plain, rng)
    cut = {name: by_hand(grad, params[name], 0.1, 1e-3) for name, grad in grads.items()}
    assert any(not np.allclose(cut[name], grads[name]) for name in grads)
    _, want = stepped(plain, params, [cut], {"lion.lr": 0.1})
    _, got = stepped(clipped, params, [grads], {"lion.lr": 0.1})
    for key, anchors in want.items():
        np.testing.assert_allclose(
            got[key]["momentum"]["momentum"], anchors["momentum"]["momentum"], rtol=1e-12
        )


def test_it_joins_every_rule_or_those_that_are_named(planned: Any) -> None:
    def joined(rules: tuple[str, ...]) -> set[str]:
        plan = planned({"muon": Muon(), "agc": AGC(rules=rules)})
        return {n for n, r in plan.rules.items() if r.stages[0][:2] == ("gradient[agc]", "agc")}

    assert joined(("*",)) == {"adamw", "muon"}
    assert joined(("adamw",)) == {"adamw"}
    with pytest.raises(PlanError, match="plugin 'agc' builds on the rule 'lion', which no"):
        joined(("lion",))
