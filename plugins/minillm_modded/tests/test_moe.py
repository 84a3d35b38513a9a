"""Tests of experts against a loop over tokens in float64: routing, capacity, outputs."""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core import EVERYTHING, PlanError
from minillm_core.config.load import load
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import LoadedPlugin
from minillm_kit import materialise
from minillm_modded.moe import MoE

DIM, ROW = 8, 9


def planned(plugin: MoE, layers: int = 1) -> Plan:
    sizes = {"layers": layers, "dim": DIM, "heads": 2, "kv_heads": 2, "hidden": 6, "vocab": 16}
    config = load(
        preset="tiny",
        assignments=[*(f"model.{k}={v}" for k, v in sizes.items()), f"train.seq_len={ROW}"],
        default_preset=lambda: ("tiny", "test"),
    ).config
    return build_plan(config, [LoadedPlugin.of("moe", plugin)])


def layer_of(plugin: MoE, seed: int) -> Any:
    """Return its experts, with weights and a bias that lead to varied choices."""
    experts, rng = materialise(planned(plugin), 0).layers[0].mlp, np.random.default_rng(seed)
    experts.router.weight = rng.standard_normal(experts.router.weight.shape)
    experts.bias = 0.1 * rng.standard_normal(experts.bias.shape)
    for one in experts.experts:
        for leaf in (one.gate, one.up, one.down):
            leaf.weight = rng.standard_normal(leaf.weight.shape)
    return experts


def expert(one: Any, x: np.ndarray) -> np.ndarray:
    gate = one.gate.weight @ x
    return one.down.weight @ (gate / (1 + np.exp(-gate)) * (one.up.weight @ x))


def definition(layer: Any, x: np.ndarray, k: int, capacity: int) -> tuple[Any, float, np.ndarray]:
    """Compute the layer token by token, in order."""
    E = len(layer.experts)
    y, load, balance = np.zeros_like(x), np.zeros(E), 0.0
    for row in range(len(x)):
        taken, chosen, mean = np.zeros(E, int), np.zeros(E), np.zeros(E)
        for t, token in enumerate(x[row]):
            logits = layer.router.weight @ token
            p = np.exp(logits) / np.exp(logits).sum()
            best = sorted(range(E), key=lambda e, p=p: -(p[e] + layer.bias[e]))[:k]
            whole = sum(p[e] for e in best) if k > 1 else 1.0
            for e in best:
                chosen[e] += 1
                if taken[e] < capacity:
                    y[row, t] += p[e] / whole * expert(layer.experts[e], token)
                taken[e] += 1
            mean += p / x.shape[1]
        load += chosen
        balance += E * np.sum(chosen / chosen.sum() * mean) / len(x)
    return y, balance, load


@settings(max_examples=25)
@given(
    experts=st.integers(2, 5),
    chosen=st.integers(1, 5),
    capacity=st.sampled_from([0.3, 1.0, 1.25, 9.0]),
    rows=st.integers(1, 3),
    length=st.integers(1, ROW),
    seed=st.integers(0, 2**32),
)
def test_outputs_are_the_definitions(
    experts: int, chosen: int, capacity: float, rows: int, length: int, seed: int
) -> None:
    chosen = min(chosen, experts)
    layer = layer_of(MoE(experts=experts, chosen=chosen, capacity=capacity), seed)
    x = np.random.default_rng(seed + 1).standard_normal((rows, length, DIM))
    y, balance, load = layer(x)
    limit = min(ROW, ceil(capacity * chosen * ROW / experts))
    want, balance_, load_ = definition(layer, x, chosen, limit)
    np.testing.assert_allclose(y, want, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(load, load_)
    assert balance == pytest.approx(balance_)
    assert layer.lookback == (EVERYTHING if limit < ROW else 0)


def test_a_row_is_as_it_would_be_alone() -> None:
    layer = layer_of(MoE(capacity=0.5), 0)
    x = np.random.default_rng(0).standard_normal((4, ROW, DIM))
    alone = np.concatenate([layer(x[row : row + 1])[0] for row in range(4)])
    np.testing.assert_allclose(layer(x)[0], alone, rtol=1e-12)


def test_the_balance_is_one_where_loads_are_alike() -> None:
    layer = layer_of(MoE(experts=3), 0)
    layer.router.weight = np.zeros_like(layer.router.weight)
    _, balance, _ = layer(np.ones((1, ROW, DIM)))
    assert balance == pytest.approx(1.0)


def test_the_bias_moves_towards_those_that_are_chosen_too_seldom() -> None:
    layer = layer_of(MoE(experts=4, bias_rate=0.01), 0)
    layer.bias = np.array([0.5, 0.0, 0.0, -0.5])
    after = layer.next_state(load=np.array([10.0, 2.0, 4.0, 0.0]))["bias"]
    np.testing.assert_allclose(after, [0.49, 0.01, 0.0, -0.49])


def test_the_bias_evens_out_a_router_that_prefers_one() -> None:
    layer = layer_of(MoE(experts=4, bias_rate=0.05), 0)
    x = np.random.default_rng(0).standard_normal((3, ROW, DIM))
    layer.router.weight[0] += x.reshape(-1, DIM).mean(0) * 50
    layer.bias = np.zeros(4)
    first = layer(x)[2]
    for _ in range(40):
        layer.bias = layer.next_state(load=layer(x)[2])["bias"]
    assert layer(x)[2].max() < first.max()


@pytest.mark.parametrize(
    ("layers", "at"), [("every:2", {0, 2}), ("all", {0, 1, 2, 3}), ([-1], {3})]
)
def test_the_named_layers_have_experts(layers: Any, at: set[int]) -> None:
    plan = planned(MoE(layers=layers), layers=4)
    assert {i for i, block in enumerate(plan.spec.blocks) if block.mlp is not None} == at


@pytest.mark.parametrize(("chosen", "width"), [(1, 6), (2, 3), (4, 2)])
def test_flops_are_those_of_the_plain_mlp_times_the_capacity(chosen: int, width: int) -> None:
    plan = planned(MoE(experts=4, chosen=chosen, capacity=1.0))
    assert plan.parameters["layers.0.mlp.experts.3.up.weight"].shape == (width, DIM)
    part = plan.estimate().part("moe")
    assert part.flops == 6 * (3 * chosen * width * DIM + 4 * DIM)  # including the router
    assert part.parameters == 4 * 3 * width * DIM + 4 * DIM


def test_without_a_weight_there_is_no_term() -> None:
    assert planned(MoE(balance=0)).spec.loss.terms == ()
    (term,) = planned(MoE(balance=0.5)).spec.loss.terms
    assert (term.key, term.weight.constant) == ("balance", 0.5)


def test_more_choices_than_experts_are_refused() -> None:
    with pytest.raises(PlanError, match=r"moe\.chosen=4, or less"):
        planned(MoE(experts=4, chosen=5))
