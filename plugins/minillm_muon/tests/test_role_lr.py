"""Tests of settings by role: selected parameters move as set, all others as before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core import PlanError, PluginError
from minillm_core.plan import Plan
from minillm_core.plugins.options import validated
from minillm_muon.muon import Muon
from minillm_muon.role_lr import ROLES, Role, RoleLR

HERE: tuple[Role, ...] = (
    "embedding",
    "head",
    "attention",
    "mlp",
    "down",
    "norm",
)  # roles of the plain model


def members(plan: Plan) -> dict[str, Any]:
    return {m.name: (m, g.rule) for g in plan.groups for m in g.members}


def fits(role: str, option: Role) -> bool:
    return any(role == one or role.startswith(one + ".") for one in ROLES[option])


@settings(max_examples=10)
@given(factors=st.dictionaries(st.sampled_from(HERE), st.floats(0, 1e3), min_size=1))
def test_the_rate_of_each_role_is_multiplied(planned: Any, factors: dict[Role, float]) -> None:
    if set(factors.values()) == {1.0}:
        return
    options: dict[str, Any] = {**factors}
    plan = planned({"muon": Muon(), "role_lr": RoleLR(**options)}, "model.tied=false")
    plain = members(planned({"muon": Muon()}, "model.tied=false"))
    for name, (member, rule) in members(plan).items():
        role = plan.parameters[name].role
        factor = next((f for option, f in factors.items() if fits(role, option)), 1.0)
        before, rule_before = plain[name]
        assert member.lr_mul == pytest.approx(before.lr_mul * factor)
        assert (member.wd_mul, rule.name) == (before.wd_mul, rule_before.name)


def test_every_parameter_has_at_most_one_option(planned: Any) -> None:
    for info in planned({"muon": Muon()}, "model.tied=false").parameters.values():
        assert sum(fits(info.role, option) for option in ROLES) == 1, info.role


def test_betas_and_decay_reach_the_update(planned: Any, drawn: Any, stepped: Any) -> None:
    """Compare with AdamW written out for one parameter."""
    role_lr = RoleLR(embedding=10, betas={"embedding": (0.5, 0.7)}, decay={"embedding": 2})
    plan = planned({"role_lr": role_lr}, "train.weight_decay=0.3", "model.tied=false")
    rng = np.random.default_rng(0)
    params, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(3)]
    got, _ = stepped(plan, params, grads, {"train.lr": 0.01})
    for name, rate, betas, decay in (
        ("embedding.weight", 0.1, (0.5, 0.7), 0.6),
        ("head.weight", 0.01, (0.9, 0.95), 0.3),
    ):
        want, m, v = params[name], 0.0, 0.0
        for step, grad in enumerate((one[name] for one in grads), 1):
            m = betas[0] * m + (1 - betas[0]) * grad
            v = betas[1] * v + (1 - betas[1]) * grad**2
            m_hat, v_hat = m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)
            want = want - rate * (m_hat / (np.sqrt(v_hat) + 1e-8) + decay * want)
        np.testing.assert_allclose(got[name], want, rtol=1e-9)


def test_it_multiplies_what_a_parameter_has_of_its_own(planned: Any) -> None:
    """A norm does not decay, whatever the factor."""
    plan = planned({"role_lr": RoleLR(decay={"norm": 5})})
    assert {members(plan)[n][0].wd_mul for n in plan.parameters if "norm" in n} == {0.0}


def test_it_changes_nothing_in_the_model(planned: Any) -> None:
    assert planned({"role_lr": RoleLR(embedding=10)}).export.layout == "llama"


@pytest.mark.parametrize(
    ("plugin", "tied", "said"),
    [
        (RoleLR(), "false", "put nothing into the plan"),
        (RoleLR(gate=2), "false", "no parameter of the role gate"),
        (RoleLR(head=2), "true", "no parameter of the role head"),
    ],
)
def test_what_has_no_effect_is_refused(planned: Any, plugin: RoleLR, tied: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        planned({"role_lr": plugin}, f"model.tied={tied}")


def test_muon_has_no_betas(planned: Any) -> None:
    both = {"muon": Muon(), "role_lr": RoleLR(betas={"mlp": (0.8, 0.9)})}
    with pytest.raises(PlanError, match="follows the rule 'muon': it has none"):
        planned(both)


@pytest.mark.parametrize(
    "options", [{"betas": {"head": [0.9, 1.0]}}, {"betas": {"heads": [0.9, 0.9]}}, {"head": -1}]
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PluginError, match="role_lr"):
        validated(RoleLR, "role_lr", options)
