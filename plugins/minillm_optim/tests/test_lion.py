"""Tests of Lion against its formulas in NumPy, and with Muon."""

from __future__ import annotations

from typing import Any

import numpy as np

from minillm_muon.muon import Muon
from minillm_optim.lion import Lion


def test_three_updates_are_the_papers(planned: Any, drawn: Any, stepped: Any) -> None:
    plan = planned({"lion": Lion(lr=0.1)}, "train.weight_decay=0.5")
    rng = np.random.default_rng(0)
    params, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(3)]
    got, _ = stepped(plan, params, grads, {"lion.lr": 0.1})
    assert {group.rule.name for group in plan.groups} == {"lion"}
    for name in ("layers.0.attention.q.weight", "layers.1.mlp.down.weight"):
        weight, mean = params[name], 0.0
        for grad in grads:
            update = np.sign(0.9 * mean + 0.1 * grad[name])
            weight = weight - 0.1 * (update + 0.5 * weight)
            mean = 0.99 * mean + 0.01 * grad[name]
        np.testing.assert_allclose(got[name], weight, atol=1e-12)


def test_what_never_had_a_gradient_stays(planned: Any, drawn: Any, stepped: Any) -> None:
    plan = planned({"lion": Lion()}, "train.weight_decay=0")
    params = drawn(plan, np.random.default_rng(0))
    still = {name: np.zeros_like(array) for name, array in params.items()}
    got, _ = stepped(plan, params, [still], {"lion.lr": 0.1})
    for name, array in params.items():
        np.testing.assert_array_equal(got[name], array)


def test_it_shares_a_model_with_muon(planned: Any) -> None:
    plan = planned({"lion": Lion(scope="rest"), "muon": Muon()})
    rules = {one.name: group.rule.name for group in plan.groups for one in group.members}
    assert rules["layers.0.attention.q.weight"] == "muon"
    assert rules["embedding.weight"] == "lion"
    assert {*rules.values()} == {"muon", "lion"}
