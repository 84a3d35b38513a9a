"""Tests of the floor under updates against its formula, by matrices and by rows, on Muon and on AdamW."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import PlanError
from minillm_kit import NumPyOps
from minillm_muon.cautious_wd import CautiousWD
from minillm_muon.muon import Muon
from minillm_muon.uw_floor import UWFloor, floored

RATES = {"muon.lr": 0.02, "train.lr": 0.01}
DOWN, NORM, TABLE = "layers.1.mlp.down.weight", "norm.weight", "embedding.weight"


def by_hand(update: np.ndarray, weight: np.ndarray, floor: float, rows: bool) -> np.ndarray:
    if rows:
        return np.stack([by_hand(u, w, floor, False) for u, w in zip(update, weight, strict=True)])
    share = np.linalg.norm(update) / np.linalg.norm(weight)
    return update * (floor / share if share < floor else 1.0)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("floor", [0.0, 0.35, 5.0])
def test_updates_have_a_least_length(
    planned: Any, drawn: Any, stepped: Any, rows: bool, floor: float
) -> None:
    """Muon's own update is taken from a run without decay, from the same weights."""
    plain = planned({"muon": Muon(weight_decay=0)})
    plan = planned({"muon": Muon(weight_decay=5), "uw_floor": UWFloor(floor=floor, rows=rows)})
    assert "uw_floor: replaces weight decay in muon" in " ".join(plan.notes)
    rng = np.random.default_rng(0)
    params, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(3)]
    params[DOWN] *= np.exp(2 * rng.standard_normal((16, 1)))  # rows of varied norms
    got, state, now, free = params, None, params, None
    for step, grad in enumerate(grads, 1):
        moved, free = stepped(plain, now, [grad], RATES, state=free, first=step)
        update = (now[DOWN] - moved[DOWN]) / 0.02
        want = now[DOWN] - 0.02 * by_hand(update, now[DOWN], floor, rows)
        got, state = stepped(plan, got, [grad], RATES, state=state, first=step)
        np.testing.assert_allclose(got[DOWN], want, rtol=1e-9, atol=1e-12)
        now = got
    if not floor:
        np.testing.assert_array_equal(got[DOWN], stepped(plain, params, grads, RATES)[0][DOWN])


def test_an_update_of_nothing_stays_nothing() -> None:
    weight = np.ones((2, 3, 4))
    for rows in (False, True):
        got, _ = floored(NumPyOps(), weight * 0, weight, {}, floor=0.35, rows=rows)
        assert not got.any()


def test_adamw_may_have_one_too(planned: Any, drawn: Any, stepped: Any) -> None:
    plan = planned({"uw_floor": UWFloor(floor=3.0, rules=("*",))})
    rng = np.random.default_rng(1)
    params, grads = drawn(plan, rng), drawn(plan, rng)
    got, _ = stepped(plan, params, [grads], RATES)
    for name in (TABLE, NORM):
        update = grads[name] / (np.abs(grads[name]) + 1e-8)
        want = params[name] - 0.01 * by_hand(update, params[name], 3.0, False)
        np.testing.assert_allclose(got[name], want, rtol=1e-9)


def test_one_plugin_decays_a_rule(planned: Any) -> None:
    both = {"muon": Muon(), "uw_floor": UWFloor(), "cautious_wd": CautiousWD()}
    with pytest.raises(PlanError, match=r"opt.extend\(muon, decay\) is claimed by both"):
        planned(both)
    plan = planned(both | {"cautious_wd": CautiousWD(rules=("adamw",))})
    owners = {n: {a: o for a, o, _ in rule.stages}["decay"] for n, rule in plan.rules.items()}
    assert owners == {"adamw": "cautious_wd", "muon": "uw_floor"}
