"""Tests of cautious decay: only where update and weight agree in sign; on every rule or one."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from minillm_core import PlanError, Plugin, plateaus
from minillm_kit import NumPyOps
from minillm_muon.cautious_wd import CautiousWD, cautious
from minillm_muon.muon import Muon

OPS: Any = NumPyOps()
pair = arrays(np.float64, (2, 5), elements=st.floats(-3, 3, allow_subnormal=False))


@given(pair, st.floats(0, 1), st.floats(0, 2))
def test_decay_goes_with_the_update_or_not_at_all(
    both: np.ndarray, decay: float, wd_mul: float
) -> None:
    update, param = both
    got, state = cautious(OPS, update, param, {}, weight_decay=decay, wd_mul=wd_mul)
    for before, after, weight in zip(update, got, param, strict=True):
        agrees = before * weight > 0
        assert after == pytest.approx(before + (decay * wd_mul * weight if agrees else 0))
        assert abs(after) >= abs(before)  # never against the update
    assert state == {}


def decays(plan: Any) -> dict[str, tuple[str, dict[str, Any], dict[str, str]]]:
    """Map each rule to the owner of its decay, its constants, and its schedule values."""
    return {
        name: next(
            (owner, dict(one.arguments), dict(one.values))
            for anchor, owner, one in rule.stages
            if anchor == "decay"
        )
        for name, rule in plan.rules.items()
    }


def test_it_takes_over_each_rules_own_decay(planned: Any) -> None:
    both = {"muon": Muon(weight_decay=1.2), "cautious_wd": CautiousWD()}
    found = decays(planned(both, "train.weight_decay=0.3"))
    assert found == {
        "adamw": ("cautious_wd", {"weight_decay": 0.3}, {}),
        "muon": ("cautious_wd", {"weight_decay": 1.2}, {}),
    }


@pytest.mark.parametrize(("rules", "plain"), [(("muon",), "adamw"), (("adamw",), "muon")])
def test_other_rules_are_left_alone(planned: Any, rules: tuple[str], plain: str) -> None:
    found = decays(planned({"muon": Muon(), "cautious_wd": CautiousWD(rules=rules)}))
    assert found[rules[0]][0] == "cautious_wd"
    assert found[plain][0] == ("core" if plain == "adamw" else "muon")


def test_weights_that_grow_do_not_decay(planned: Any, drawn: Any, stepped: Any) -> None:
    """Compare with AdamW, whose first update has the gradient's sign and magnitude one."""
    plan = planned({"cautious_wd": CautiousWD()}, "train.weight_decay=0.5")
    rng = np.random.default_rng(0)
    params, grads = drawn(plan, rng), drawn(plan, rng)
    got, _ = stepped(plan, params, [grads], {"train.lr": 0.01})
    name = "layers.0.attention.q.weight"
    param, sign = params[name], np.sign(grads[name])
    want = param - 0.01 * (sign + 0.5 * np.where(sign * param > 0, param, 0))
    np.testing.assert_allclose(got[name], want, atol=1e-6)


class Growing(Plugin, api=1):
    """Rates that grow with the batch, which the records square for Adam's decay too."""

    def optimizer_factory(self, optimizer):
        optimizer.rates(plateaus((0, 1.0), (0.5, 1.73)))


@pytest.mark.parametrize("squared", [(), ("adamw",)])
def test_adamw_decays_as_record_50_does(
    planned: Any, drawn: Any, stepped: Any, squared: tuple[str, ...]
) -> None:
    """Compare several updates of AdamW with a falling learning rate; the record's decay is lr^2 wd."""
    cautious_wd = CautiousWD(rules=("adamw",), squared=squared)
    both = {"cautious_wd": cautious_wd, "growing": Growing()}
    plan = planned(both, "train.weight_decay=0.5", "train.lr=0.02")
    rng, name, shares = np.random.default_rng(1), "embedding.weight", (1.0, 0.5, 0.25)
    params, grads = drawn(plan, rng), [drawn(plan, rng) for _ in shares]
    faded = {one for one in plan.schedules if one.endswith("fading")}
    values = [{"train.lr": 0.02 * s, **dict.fromkeys(faded, s)} for s in shares]
    got, _ = stepped(plan, params, grads, values)
    p, m, v = params[name], 0.0, 0.0
    for t, (share, grad) in enumerate(zip(shares, (one[name] for one in grads), strict=True), 1):
        m, v = 0.9 * m + 0.1 * grad, 0.95 * v + 0.05 * grad**2
        u = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
        decay = 0.5 * (share if squared else 1.0)
        p = p - 0.02 * share * (u + decay * p * (u * p > 0))
    np.testing.assert_allclose(got[name], p, rtol=1e-10)
    assert bool(faded) == bool(squared)
    for at in (0.1, 0.9):
        now = plan.values(at)
        assert all(now[one] == pytest.approx(now["train.lr"] / 0.02) for one in faded)


@pytest.mark.parametrize(
    ("rules", "squared"),
    [(("*",), ("adamw",)), (("*", "adamw"), ()), (("muon",), ("*",)), (("muon",), ("adamw",))],
)
def test_squared_names_one_of_the_rules(
    planned: Any, rules: tuple[str, ...], squared: tuple[str, ...]
) -> None:
    starred = "*" in (*rules, *squared)
    said = 'beside "\\*", which is every rule' if starred else "squared names adamw, but"
    with pytest.raises(PlanError, match=said) as caught:
        planned({"cautious_wd": CautiousWD(rules=rules, squared=squared), "muon": Muon()})
    (given,) = re.findall(r"^cautious_wd\.rules=(\[.*?\])", str(caught.value.fix))
    fixed = CautiousWD(rules=json.loads(given), squared=("adamw",))
    found = decays(planned({"cautious_wd": fixed, "muon": Muon()}))
    assert {name: bool(values) for name, (_, _, values) in found.items()} == {
        "adamw": True,
        "muon": False,
    }


def test_every_rule_may_be_squared(planned: Any) -> None:
    every = CautiousWD(squared=("*",))
    found = decays(planned({"cautious_wd": every, "muon": Muon()}))
    assert all([*values] == ["fading"] for _, _, values in found.values())


@pytest.mark.parametrize(
    ("rules", "said"),
    [(("muon",), "--plugins muon,cautious_wd"), (("adamw", "adamw"), "claims slot .* twice")],
)
def test_rules_that_are_not_there_or_named_twice_are_refused(
    planned: Any, rules: tuple[str, ...], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        planned({"cautious_wd": CautiousWD(rules=rules)})
