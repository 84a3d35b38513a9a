"""Tests of EMA-Nesterov against its published loop around AdamW and Muon: gradients, and evaluated weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import PlanError
from minillm_core.inspection import views_of
from minillm_kit import NumPyFramework
from minillm_muon.head_muon import HeadMuon
from minillm_muon.muon import Muon
from minillm_optim.ema import EMA
from minillm_optim.ema_nesterov import EMANesterov
from minillm_optim.snoo import Snoo

STEPS = 10
MUON = {"muon": Muon(), "head_muon": HeadMuon(heads=1)}


def viewed(plan: Any, params: Any, state: Any) -> dict[str, np.ndarray]:
    groups = {str(i): g for i, g in enumerate(plan.groups)}
    return dict(views_of(NumPyFramework(), groups, params, state))


@pytest.mark.parametrize("rule", [{}, MUON])
def test_it_is_the_published_loop(planned: Any, drawn: Any, stepped: Any, rule: Any) -> None:
    plain = planned(rule)
    look = EMANesterov(beta=0.5, gamma=0.8, start=0.2, stop=0.7)
    plan = planned(rule | {"ema_nesterov": look})
    rng = np.random.default_rng(0)
    start, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(STEPS)]
    y, free, got, held = start, None, start, None
    mean, x = {name: 0.0 for name in start}, {}
    for step, grad in enumerate(grads, 1):
        values, at = plan.values(step / STEPS), step / STEPS
        share = plain.values(at)["train.lr"] / plain.config.train.lr
        beta = 0.5 * share if 0.2 < at <= 0.7 else 0.0
        new, free = stepped(plain, y, [grad], plain.values(at), state=free, first=step)
        if x:
            mean = {name: 0.8 * mean[name] + 0.2 * (new[name] - x[name]) for name in new}
        x, y = new, {name: new[name] + beta * mean[name] for name in new}
        got, held = stepped(plan, got, [grad], values, state=held, first=step)
        seen = viewed(plan, got, held)
        for name in x:
            np.testing.assert_allclose(got[name], y[name], rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(seen[name], x[name], rtol=1e-9, atol=1e-12)
    assert seen.keys() == plan.parameters.keys()
    at = plan.values(0.5)
    most, more = (at | {name: one for name in at if name.endswith("beta")} for one in (0.5, 0.8))
    (want, _), (got, _) = (stepped(plan, got, grads[:1], one, held) for one in (most, more))
    for name in want:  # a schedule above its peak, as of batch_schedule, looks no further
        np.testing.assert_array_equal(got[name], want[name])


def test_before_its_start_and_without_beta_it_is_the_rule_alone(
    planned: Any, drawn: Any, stepped: Any
) -> None:
    rng = np.random.default_rng(1)
    plain, early = planned({}), planned({"e": EMANesterov(start=0.9, stop=1.0)})
    none = planned({"e": EMANesterov(beta=0.0, start=0.0)})
    params, grads = drawn(plain, rng), [drawn(plain, rng) for _ in range(5)]
    want, _ = stepped(plain, params, grads, [plain.values(0.5)] * 5)
    for plan in (early, none):
        got, state = stepped(plan, params, grads, [plan.values(0.5)] * 5)
        for name, array in want.items():
            np.testing.assert_array_equal(got[name], array)
            np.testing.assert_array_equal(viewed(plan, got, state)[name], array)


def test_there_is_one_look_ahead_and_one_view(planned: Any) -> None:
    with pytest.raises(PlanError, match=r"opt.extend\(adamw, lookahead\) is claimed by both"):
        planned({"e": EMANesterov(), "snoo": Snoo()})
    with pytest.raises(PlanError, match=r"opt.view\[embedding.weight\] is claimed by both"):
        planned({"e": EMANesterov(), "ema": EMA()})
    with pytest.raises(PlanError, match=r"start=0.8 is not before"):
        planned({"e": EMANesterov(start=0.8)})
