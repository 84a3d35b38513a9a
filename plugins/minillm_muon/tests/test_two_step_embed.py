"""Tests of two-step updates against AdamW of summed gradients, and over a resume between the two steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import PlanError
from minillm_muon.cautious_wd import CautiousWD
from minillm_muon.muon import Muon
from minillm_muon.role_lr import RoleLR
from minillm_muon.two_step_embed import TwoStepEmbed

TABLE, HIDDEN, NORM = "embedding.weight", "layers.0.mlp.up.weight", "norm.weight"
RATES = {"two_step.lr": 0.01, "train.lr": 0.01, "muon.lr": 0.02}


def adamw(param: np.ndarray, grads: list[np.ndarray], beta1: float, cautious: bool) -> np.ndarray:
    """Apply AdamW to one parameter: beta2 0.95, epsilon 1e-8, decay 0.1."""
    m, v = 0.0, 0.0
    for t, grad in enumerate(grads, 1):
        m, v = beta1 * m + (1 - beta1) * grad, 0.95 * v + 0.05 * grad**2
        update = m / (1 - beta1**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
        decayed = np.where(update * param > 0, param, 0) if cautious else param
        param = param - 0.01 * (update + 0.1 * decayed)
    return param


@pytest.mark.parametrize("steps", [1, 4, 7])
@pytest.mark.parametrize("cautious", [False, True])
def test_every_other_step_is_adamw_of_two_gradients(
    planned: Any, drawn: Any, stepped: Any, steps: int, cautious: bool
) -> None:
    more = {"cautious_wd": CautiousWD()} if cautious else {}
    tied = ("model.tied=false", "train.betas=[0.9,0.95]", "train.weight_decay=0.1")
    plan = planned({"two_step_embed": TwoStepEmbed(), **more}, *tied)
    rng = np.random.default_rng(0)
    params, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(steps)]
    got, _ = stepped(plan, params, grads, RATES)
    for name in (TABLE, "head.weight"):
        pairs = [grads[i][name] + grads[i + 1][name] for i in range(0, steps - 1, 2)]
        want = adamw(params[name], pairs, 0.9, cautious)
        np.testing.assert_allclose(got[name], want, rtol=1e-10, atol=1e-12)
    every = [grad[HIDDEN] for grad in grads]
    want = adamw(params[HIDDEN], every, 0.9, cautious)
    np.testing.assert_allclose(got[HIDDEN], want, rtol=1e-10, atol=1e-12)


def test_betas_and_rates_of_a_role_are_followed(planned: Any, drawn: Any, stepped: Any) -> None:
    roles = RoleLR(embedding=3.0, betas={"embedding": (0.5, 0.95)})
    plan = planned({"two": TwoStepEmbed(), "role_lr": roles, "muon": Muon()})
    rng = np.random.default_rng(1)
    params, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(2)]
    got, _ = stepped(plan, params, grads, RATES)
    total = grads[0][TABLE] + grads[1][TABLE]
    want = params[TABLE] - 0.03 * (total / (np.abs(total) + 1e-8) + 0.1 * params[TABLE])
    np.testing.assert_allclose(got[TABLE], want, rtol=1e-9)
    assert {g.rule.name for g in plan.groups} == {"adamw", "muon", "two_step"}


def test_the_state_carries_the_first_gradient_over_a_resume(
    planned: Any, drawn: Any, stepped: Any
) -> None:
    plan = planned({"two": TwoStepEmbed()})
    rng = np.random.default_rng(2)
    params, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(6)]
    want, _ = stepped(plan, params, grads, RATES)
    middle, state = stepped(plan, params, grads[:3], RATES)
    got, _ = stepped(plan, middle, grads[3:], RATES, state=state, first=4)
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array)


def test_roles_are_chosen_or_refused(planned: Any) -> None:
    plan = planned({"two": TwoStepEmbed(roles=("norm",))})
    followed = {m.name for g in plan.groups if g.rule.name == "two_step" for m in g.members}
    assert followed == {name for name, info in plan.parameters.items() if info.role == "norm"}
    with pytest.raises(PlanError, match="no parameter fits"):
        planned({"two": TwoStepEmbed(roles=("tail",))})
