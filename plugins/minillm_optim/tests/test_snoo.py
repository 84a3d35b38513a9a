"""Tests of Snoo against torch's SGD as in its published code, with AdamW and Muon, and of its neutral settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from minillm_core import PlanError
from minillm_muon.muon import Muon
from minillm_muon.two_step_embed import TwoStepEmbed
from minillm_optim.ema import EMA
from minillm_optim.schedule_free import ScheduleFree
from minillm_optim.snoo import Snoo

RATES = {"train.lr": 0.01, "muon.lr": 0.02}
STEPS = 8


@pytest.mark.parametrize("rule", [{}, {"muon": Muon()}])
@pytest.mark.parametrize("every", [1, 3])
def test_outer_steps_are_those_of_torchs_sgd(
    planned: Any, drawn: Any, stepped: Any, rule: dict[str, Any], every: int
) -> None:
    """Inner updates equal those of a run without it, from the weights that the outer step left."""
    plain = planned(rule)
    plan = planned(rule | {"snoo": Snoo(every=every, lr=0.7, momentum=0.4)})
    rng = np.random.default_rng(0)
    now, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(STEPS)]
    got, held, free = now, None, None
    slow, sgd = {}, None
    for step, grad in enumerate(grads, 1):
        values = plain.values(step / STEPS)
        now, free = stepped(plain, now, [grad], values, state=free, first=step)
        if sgd is None:
            slow = {name: torch.tensor(array.copy()) for name, array in now.items()}
            sgd = torch.optim.SGD(slow.values(), lr=0.7, momentum=0.4, nesterov=True)
        if (step - 1) % every == 0:
            for name, tensor in slow.items():
                tensor.grad = tensor - torch.tensor(now[name])
            sgd.step()
            now = {name: tensor.numpy().copy() for name, tensor in slow.items()}
        got, held = stepped(plan, got, [grad], values, state=held, first=step)
        for name, array in now.items():
            np.testing.assert_allclose(got[name], array, rtol=1e-9, atol=1e-12)


def test_a_rate_of_one_without_momentum_is_the_inner_optimizer(
    planned: Any, drawn: Any, stepped: Any
) -> None:
    plan = planned({"snoo": Snoo(every=2, lr=1.0, momentum=0.0)})
    rng = np.random.default_rng(1)
    params, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(STEPS)]
    want, _ = stepped(planned({}), params, grads, RATES)
    got, _ = stepped(plan, params, grads, RATES)
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array)


def test_it_goes_with_an_average_and_with_a_write_of_another(planned: Any) -> None:
    plugins = {"muon": Muon(), "ema": EMA(), "two": TwoStepEmbed(), "snoo": Snoo()}
    for name, rule in planned(plugins).rules.items():
        owners = {anchor: owner for anchor, owner, _ in rule.stages}
        assert (owners["lookahead"], owners["average"]) == ("snoo", "ema")
        assert owners["write"] == {"adamw": "core", "muon": "muon", "two_step": "two"}[name]


@pytest.mark.parametrize("scope", ["all", "hidden"])
def test_it_does_not_move_what_a_write_keeps_points_beside(planned: Any, scope: str) -> None:
    """Schedule-free's z and its average refer to the parameter that its write left."""
    with pytest.raises(
        PlanError, match=r"'snoo' moves parameters after the write of 'free'"
    ) as found:
        planned({"free": ScheduleFree(scope=scope), "snoo": Snoo()})
    assert "peak, weight and x" in str(found.value)
    assert found.value.plugins == ("free", "snoo")
    assert "leave out 'free' or 'snoo'" in str(found.value.fix)
