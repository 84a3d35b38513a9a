"""Tests of AdamW's variants against their papers' formulas in NumPy, over several updates, and with Muon."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minillm_core import PlanError, Plugin
from minillm_muon.muon import Muon
from minillm_muon.role_lr import RoleLR
from minillm_optim.adafactor import Adafactor
from minillm_optim.ademamix import AdEMAMix
from minillm_optim.cautious_adam import CautiousAdam
from minillm_optim.galore import GaLore
from minillm_optim.mars import MARS
from minillm_optim.schedule_free import ScheduleFree

UPDATES = 4
Arrays = dict[str, np.ndarray]


class Cautious:
    """The published code's algorithm for one parameter."""

    m = v = 0.0

    def step(self, p: np.ndarray, g: np.ndarray, t: int) -> np.ndarray:
        self.m, self.v = 0.9 * self.m + 0.1 * g, 0.95 * self.v + 0.05 * g * g
        u = self.m / (1 - 0.9**t) / (np.sqrt(self.v / (1 - 0.95**t)) + 1e-8)
        mask = (self.m * g > 0).astype(float)
        return u * mask / max(mask.mean(), 1e-3)


class Mixture:
    """AdEMAMix with a warm-up over the whole run."""

    fast = slow = v = 0.0

    def __init__(self, b1: float = 0.9) -> None:
        self.b1 = b1

    def step(self, p: np.ndarray, g: np.ndarray, t: int) -> np.ndarray:
        share, b1, b3 = t / UPDATES, self.b1, max(self.b1, 0.99)
        alpha = 5.0 * share
        if b1:
            over = (1 - share) * math.log(b3) + share * math.log(b1)
            beta3 = min(math.exp(math.log(b1) * math.log(b3) / over), b3)
        else:
            beta3 = b3 ** (1 / share)
        self.fast, self.v = b1 * self.fast + (1 - b1) * g, 0.999 * self.v + 0.001 * g * g
        self.slow = beta3 * self.slow + (1 - beta3) * g
        mean = self.fast / (1 - b1**t) + alpha * self.slow
        return mean / (np.sqrt(self.v / (1 - 0.999**t)) + 1e-8)


class Corrected:
    """MARS-AdamW, in its approximate form."""

    m = v = 0.0
    last: np.ndarray | None = None

    def step(self, p: np.ndarray, g: np.ndarray, t: int) -> np.ndarray:
        last = g if self.last is None else self.last
        c = g + 0.5 * 0.95 / 0.05 * (g - last)
        size = np.linalg.norm(c)
        c, self.last = (c / size if size > 1 else c), g
        self.m, self.v = 0.95 * self.m + 0.05 * c, 0.99 * self.v + 0.01 * c * c
        return self.m / (1 - 0.95**t) / (np.sqrt(self.v / (1 - 0.99**t)) + 1e-8)


class Factored:
    """Adafactor with relative steps."""

    rows = columns = v = 0.0

    def step(self, p: np.ndarray, g: np.ndarray, t: int) -> np.ndarray:
        beta, squares = 1 - t**-0.8, g * g + 1e-30
        if g.ndim == 2:
            self.rows = beta * self.rows + (1 - beta) * squares.mean(1)
            self.columns = beta * self.columns + (1 - beta) * squares.mean(0)
            v = np.outer(self.rows, self.columns) / self.rows.mean()
        else:
            v = self.v = beta * self.v + (1 - beta) * squares
        u = g / np.sqrt(v)
        u = u / max(1.0, np.sqrt((u * u).mean()))
        return u * max(1e-3, np.sqrt((p * p).mean()))


CASES: dict[str, tuple[Callable[..., Plugin], dict[str, Any], type]] = {
    "cautious_adam": (CautiousAdam, {}, Cautious),
    "ademamix": (AdEMAMix, {"beta3": 0.99}, Mixture),
    "mars": (MARS, {"gamma": 0.5}, Corrected),
    "adafactor": (Adafactor, {}, Factored),
}


@pytest.mark.parametrize("name", CASES)
def test_updates_are_the_papers(planned: Any, drawn: Any, stepped: Any, name: str) -> None:
    plugin, options, by_hand = CASES[name]
    plan = planned({name: plugin(**options)}, "train.weight_decay=0.5")
    rng = np.random.default_rng(0)
    params, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(UPDATES)]
    params["layers.0.attention_norm.weight"] *= 1e-5  # below Adafactor's minimum scale
    got, state = params, None
    for t, grad in enumerate(grads, 1):
        values = plan.values(t / UPDATES) | {f"{name}.lr": 0.1}
        got, state = stepped(plan, got, [grad], values, state=state, first=t)
    for parameter, weight in params.items():
        rule = by_hand()
        for t, grad in enumerate(grads, 1):
            decayed = 0.5 * plan.parameters[parameter].wd_mul * weight
            weight = weight - 0.1 * (rule.step(weight, grad[parameter], t) + decayed)
        np.testing.assert_allclose(got[parameter], weight, rtol=1e-9, err_msg=parameter)


def test_a_slow_mean_that_is_the_faster_one_is_refused(planned: Any) -> None:
    with pytest.raises(PlanError, match=r"beta3=0\.8 is below ademamix\.beta1=0\.9") as caught:
        planned({"ademamix": AdEMAMix(beta3=0.8)})
    assert "ademamix.beta3=0.9 or more, or ademamix.beta1=0.8 or less" in str(caught.value)
    assert planned({"ademamix": AdEMAMix(beta3=0.9)})


@pytest.mark.parametrize("beta1", [0.0, 0.5, 0.995])
def test_ademamix_has_a_parameters_own_betas(
    planned: Any, drawn: Any, stepped: Any, beta1: float
) -> None:
    """0 has a limit, and above beta3 both means decay alike."""
    own = RoleLR(betas={"norm": (beta1, 0.999)})
    plan = planned({"ademamix": AdEMAMix(beta3=0.99), "role_lr": own})
    rng, rule, name = np.random.default_rng(2), Mixture(beta1), "norm.weight"
    params, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(UPDATES)]
    values = [plan.values(t / UPDATES) | {"ademamix.lr": 0.1} for t in range(1, UPDATES + 1)]
    got, _ = stepped(plan, params, grads, values)
    want = params[name]
    for t, grad in enumerate(grads, 1):
        want = want - 0.1 * rule.step(want, grad[name], t)
    np.testing.assert_allclose(got[name], want, rtol=1e-9)
    still, _ = stepped(plan, params, grads[:1], values[0] | {"ademamix.warm": 0.0})  # by the clock
    assert np.isfinite(still[name]).all()


def test_adafactors_are_torchs_where_steps_are_relative(
    planned: Any, drawn: Any, stepped: Any
) -> None:
    torch = pytest.importorskip("torch")
    plan = planned({"adafactor": Adafactor()}, "train.weight_decay=0")
    rng = np.random.default_rng(1)
    params, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(3)]
    got, _ = stepped(plan, params, grads, {"adafactor.lr": 0.1})
    tensors = {name: torch.nn.Parameter(torch.tensor(p)) for name, p in params.items()}
    theirs = torch.optim.Adafactor(tensors.values(), lr=0.1, weight_decay=0.0, eps=(1e-30, 1e-3))
    for step, grad in enumerate(grads, 1):
        assert 1 / math.sqrt(step) >= 0.1  # torch's learning rate is the smaller one
        for name, tensor in tensors.items():
            tensor.grad = torch.tensor(grad[name])
        theirs.step()
    for name, tensor in tensors.items():
        np.testing.assert_allclose(got[name], tensor.detach().numpy(), rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_it_shares_a_model_with_muon(planned: Any, name: str) -> None:
    plan = planned({name: CASES[name][0](scope="rest"), "muon": Muon()})
    rules = {one.name: group.rule.name for group in plan.groups for one in group.members}
    assert rules["layers.0.attention.q.weight"] == "muon"
    assert rules["embedding.weight"] == name
    assert {*rules.values()} == {"muon", name}


def test_adafactor_keeps_a_number_a_row_and_a_column(planned: Any) -> None:
    plan = planned({"adafactor": Adafactor()})
    assert plan.estimate().memory["optimizer state (adafactor)"] < plan.num_parameters


@pytest.mark.parametrize("rule", [AdEMAMix(), GaLore(), ScheduleFree()])
def test_means_of_a_branch_are_corrected_by_its_own_updates(
    planned: Any, drawn: Any, stepped: Any, rule: Plugin
) -> None:
    """By the run's 1,000 updates before it, its first ones would be 3 to 6 times as large."""
    plan = planned({"rule": rule})
    rng = np.random.default_rng(4)
    params, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(3)]
    values = plan.values(0.5)
    first, _ = stepped(plan, params, grads, values)
    later, _ = stepped(plan, params, grads, values, first=1001)
    for group in plan.groups:
        for member in group.members if group.rule.name != "adamw" else ():
            np.testing.assert_array_equal(later[member.name], first[member.name])


def test_a_branch_to_mars_corrects_from_its_second_update_on(
    planned: Any, drawn: Any, stepped: Any
) -> None:
    """The run before it kept no gradient."""
    rng, number, got = np.random.default_rng(3), 50, {}
    params, grads = drawn(planned({"mars": MARS()}), rng), None
    for gamma in (0.0, 0.5):
        plan = planned({"mars": MARS(gamma=gamma)})
        grads = grads or [drawn(plan, rng) for _ in range(2)]
        values = plan.values(0.5) | {"mars.lr": 0.1}
        for count in (1, 2):
            got[gamma, count], _ = stepped(plan, params, grads[:count], values, first=number)
    for name in params:
        np.testing.assert_array_equal(got[0.5, 1][name], got[0.0, 1][name])
        assert (got[0.5, 2][name] != got[0.0, 2][name]).any()
