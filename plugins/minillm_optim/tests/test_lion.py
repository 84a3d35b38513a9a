"""Tests of Lion against its formulas in NumPy, with Muon, and with tables that have betas of AdamW."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import Plugin
from minillm_modded.value_embeds import ValueEmbeds
from minillm_muon.muon import Muon
from minillm_optim.adafactor import Adafactor
from minillm_optim.cautious_adam import CautiousAdam
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


@pytest.mark.parametrize(
    ("rule", "want"),
    [
        (Lion(beta1=0.8, beta2=0.9), {"mixed": 0.8, "kept": 0.9}),
        (Adafactor(), {"decay": 0.8, "clipping": 1.0}),
        (CautiousAdam(), {"beta1": 0.75, "beta2": 0.95}),
    ],
)
def test_betas_of_tables_are_for_rules_with_those_of_adam(
    planned: Any, rule: Plugin, want: dict[str, float]
) -> None:
    plan = planned({type(rule).__name__.lower(): rule, "value_embeds": ValueEmbeds(gate_width=4)})
    (group,) = (
        one for one in plan.groups for member in one.members if "value_embedding" in member.name
    )
    held = {name: value for _, _, one in group.rule.stages for name, value in one.arguments}
    assert held.items() >= want.items()
    text = f"the rule '{group.rule.name}' of its parameters has none of Adam's"
    said = [one for one in plan.notes if "its betas" in one]
    assert said == [f"value_embeds: its betas are not used: {text}"] * ("beta1" not in want)
