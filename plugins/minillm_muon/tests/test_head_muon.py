"""Tests of head-wise Muon against Muon of each head's own matrix, and of parameters that cannot be split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import Layers, PlanError, Plugin
from minillm_kit import NumPyOps
from minillm_mix.gated_delta import GatedDelta
from minillm_muon.head_muon import HeadMuon
from minillm_muon.muon import Muon, newton_schulz
from minillm_muon.normuon import NorMuon

OPS: Any = NumPyOps()
Q, K, V, UP = (
    f"layers.0.{name}.weight" for name in ("attention.q", "attention.k", "attention.v", "mlp.up")
)
RATES = {"muon.lr": 0.02, "train.lr": 0.001}


def muon(param: np.ndarray, grads: list[np.ndarray]) -> np.ndarray:
    """Apply Muon to one matrix: momentum 0.95, decay 0.1."""
    mean, tall = np.zeros_like(param), max(1, param.shape[0] / param.shape[1]) ** 0.5
    for grad in grads:
        mean = 0.95 * mean + 0.05 * grad
        (direction,), _ = newton_schulz(OPS, (0.05 * grad + 0.95 * mean)[None], None, {}, steps=5)
        param = param - 0.02 * (tall * direction + 0.1 * param)
    return param


@pytest.mark.parametrize(
    ("heads", "of", "parts"),
    [
        (2, ("q", "k"), {Q: 2, K: 1, V: 1, UP: 1}),
        (1, ("q", "k", "v"), {Q: 4, K: 2, V: 2, UP: 1}),
        (1, ("v",), {Q: 1, K: 1, V: 2, UP: 1}),
    ],
)
def test_each_part_is_a_matrix_of_its_own(
    planned: Any, drawn: Any, stepped: Any, heads: int, of: Any, parts: dict[str, int]
) -> None:
    plan = planned({"muon": Muon(), "head_muon": HeadMuon(heads=heads, of=of)})
    rng = np.random.default_rng(0)
    params, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(3)]
    got, _ = stepped(plan, params, grads, RATES)
    for name, count in parts.items():
        mine = [np.split(one[name], count) for one in grads]
        whole = [
            muon(part, [grad[index] for grad in mine])
            for index, part in enumerate(np.split(params[name], count))
        ]
        np.testing.assert_allclose(got[name], np.concatenate(whole), rtol=1e-9, atol=1e-12)
    groups = plan.data()["optimizer"]["groups"]
    found = {m["name"]: m.get("blocks", 1) for one in groups for m in one["members"]}
    assert {name: found[name] for name in parts} == parts


def test_all_heads_in_one_matrix_are_muon(planned: Any, drawn: Any, stepped: Any) -> None:
    plain = planned({"muon": Muon()})
    plan = planned({"muon": Muon(), "head_muon": HeadMuon(heads=4, of=("q",))})
    assert plan.data()["optimizer"]["groups"] == plain.data()["optimizer"]["groups"]


def test_neurons_and_factors_are_those_of_a_part(planned: Any, drawn: Any, stepped: Any) -> None:
    plugins = {"muon": Muon(), "normuon": NorMuon(), "head_muon": HeadMuon(heads=1, of=("q",))}
    plan = planned(plugins)
    rng = np.random.default_rng(1)
    params, grads = drawn(plan, rng), drawn(plan, rng)
    got, state = stepped(plan, params, [grads], RATES)
    (kept,) = {
        one["precondition"]["second"].shape
        for index, one in state.items()
        if plan.groups[int(index)].members[0].name.endswith("attention.q.weight")
    }
    assert kept == (2, 4, 1, 16)  # layers, heads, and a number per column of a head (4, 16)
    for part, grad, weight in zip(*(np.split(x[Q], 4) for x in (got, grads, params)), strict=True):
        (polar,), _ = newton_schulz(OPS, (0.0975 * grad)[None], None, {}, steps=5)
        mean = np.mean(polar**2, 0, keepdims=True)
        even = polar / np.sqrt(0.05 * mean)
        even *= np.linalg.norm(polar) / np.linalg.norm(even)
        np.testing.assert_allclose(part, weight - 0.02 * (even + 0.1 * weight), rtol=1e-9)


def test_heads_are_counted_where_a_matrix_has_them(planned: Any) -> None:
    gated = GatedDelta(layers=Layers([0]))  # its K and V have as many heads as Q
    plugins = {"muon": Muon(), "gated_delta": gated, "head_muon": HeadMuon(of=("q", "k", "v"))}
    groups = planned(plugins, "model.layers=2").data()["optimizer"]["groups"]
    blocks = {m["name"]: m.get("blocks", 1) for one in groups for m in one["members"]}
    found = [[blocks[f"layers.{i}.attention.{one}.weight"] for one in "qkv"] for i in (0, 1)]
    assert found == [[2, 2, 2], [2, 1, 1]]
    assert blocks["layers.0.attention.gate.weight"] == 1  # scales y, and holds no values


class ForMLPs(Plugin, api=1):
    """A rule named as Muon that does not train heads."""

    def optimizer_factory(self, optimizer):
        optimizer.rule("muon", lr=0.1)
        optimizer.assign("muon", lambda _, p: p.role.startswith("mlp."))


def test_what_cannot_be_split_is_refused(planned: Any) -> None:
    with pytest.raises(PlanError, match="builds on the rule 'muon'"):
        planned({"head_muon": HeadMuon()})
    with pytest.raises(PlanError, match=r"splits '.*q.weight' into matrices.* the rule 'adamw'"):
        planned({"other": ForMLPs(), "head_muon": HeadMuon()})
    with pytest.raises(PlanError, match="does not divide the 2 heads of 'k'"):
        planned({"muon": Muon(), "head_muon": HeadMuon(heads=4)})
