"""Tests of Muon against a NumPy float64 definition, against torch.optim.Muon, and of its properties."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm_core import PlanError
from minillm_core.backends.torch.ops import TorchOps
from minillm_core.config.load import load
from minillm_core.optim.groups import Group
from minillm_core.optim.update import initial_state, update
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import LoadedPlugin
from minillm_kit import NumPyOps
from minillm_muon.muon import COEFFICIENTS, Muon, match_rms, newton_schulz, spectral

OPS: Any = NumPyOps()
Arrays = dict[str, np.ndarray]
Adjust = Literal["spectral", "match_rms"]
Q = "layers.0.attention.q.weight"  # square
K = "layers.0.attention.k.weight"  # wide
UP = "layers.0.mlp.up.weight"  # tall


def planned(plugin: Muon, *settings: str) -> Plan:
    size = ("model.layers=2", "model.dim=16", "model.hidden=40", "model.vocab=32")
    config = load(
        preset="tiny", assignments=(*size, *settings), default_preset=lambda: ("tiny", "test")
    ).config
    return build_plan(config, [LoadedPlugin.of("muon", plugin)])


def published(x: Any, steps: int = 5) -> Any:
    """Iterate Newton-Schulz as published on one matrix of NumPy or torch, in its dtype; no taller than wide."""
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def orthogonalised(matrix: np.ndarray, steps: int = 5) -> np.ndarray:
    """Apply Newton-Schulz as published to one matrix, without batching."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = published(x / (np.linalg.norm(x) + 1e-7), steps)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def definition(
    param: np.ndarray, grads: list[np.ndarray], lr: float, decay: float, adjust: str, beta: float
) -> np.ndarray:
    mean = np.zeros_like(param)
    rows, cols = param.shape
    size = {"spectral": max(1, rows / cols) ** 0.5, "match_rms": 0.2 * max(rows, cols) ** 0.5}
    for grad in grads:
        mean = beta * mean + (1 - beta) * grad
        direction = orthogonalised((1 - beta) * grad + beta * mean)
        param = param - lr * (size[adjust] * direction + decay * param)
    return param


def run(plan: Plan, params: Arrays, grads: list[Arrays], values: dict[str, float]) -> Arrays:
    groups: dict[str, Group] = {str(i): group for i, group in enumerate(plan.groups)}
    state = initial_state(groups, np.zeros)
    for step, grad in enumerate(grads, 1):
        params, state = update(OPS, groups, params, grad, 1.0, state, float(step), values)
    return params


def drawn(plan: Plan, rng: np.random.Generator) -> Arrays:
    return {name: rng.standard_normal(info.shape) for name, info in plan.parameters.items()}


@pytest.mark.parametrize("adjust", ["spectral", "match_rms"])
@pytest.mark.parametrize("momentum", [0.0, 0.95])
def test_updates_are_the_definitions(adjust: Adjust, momentum: float) -> None:
    plan = planned(Muon(adjust=adjust, momentum=momentum), "train.weight_decay=0.3")
    rng = np.random.default_rng(0)
    params, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(4)]
    got = run(plan, params, grads, {"muon.lr": 0.02, "train.lr": 0.001})
    matrices = [m.name for g in plan.groups if g.rule.name == "muon" for m in g.members]
    assert len(matrices) == 14
    for name in matrices:
        mine = [grad[name] for grad in grads]
        want = definition(params[name], mine, 0.02, 0.3, adjust, momentum)
        np.testing.assert_allclose(got[name], want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("adjust", ["spectral", "match_rms"])
@pytest.mark.parametrize("name", [Q, K, UP])
def test_torchs_muon_agrees(adjust: Adjust, name: str) -> None:
    """Its momentum is the same running mean, its decay also decoupled; it iterates in bfloat16."""
    plan = planned(Muon(adjust=adjust), "train.weight_decay=0.3")
    rng = np.random.default_rng(1)
    params, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(4)]
    got = run(plan, params, grads, {"muon.lr": 0.02, "train.lr": 0.001})
    tensor = torch.nn.Parameter(torch.tensor(params[name], dtype=torch.float32))
    theirs = {"spectral": "original", "match_rms": "match_rms_adamw"}[adjust]
    optimizer = torch.optim.Muon(
        [tensor], lr=0.02, weight_decay=0.3, momentum=0.95, adjust_lr_fn=theirs
    )
    for grad in grads:
        tensor.grad = torch.tensor(grad[name], dtype=torch.float32)
        optimizer.step()
    moved = np.linalg.norm(got[name] - params[name])
    assert np.linalg.norm(got[name] - tensor.detach().numpy()) < 0.02 * moved


def with_singular_values(rng: np.random.Generator, rows: int, values: np.ndarray) -> np.ndarray:
    """Build a matrix (rows, len(values)), or transposed, with these singular values."""
    u, _ = np.linalg.qr(rng.standard_normal((rows, len(values))))
    v, _ = np.linalg.qr(rng.standard_normal((len(values), len(values))))
    return u @ np.diag(values) @ v.T


def five(stack: np.ndarray) -> np.ndarray:
    return newton_schulz(OPS, stack, None, {}, steps=5)[0]


@given(
    seed=st.integers(0, 2**32),
    values=st.lists(st.floats(0.02, 1), min_size=1, max_size=8),
    extra=st.integers(0, 6),
    size=st.floats(1e-3, 1e3),
    turned=st.booleans(),
)
def test_singular_values_come_near_one(
    seed: int, values: list[float], extra: int, size: float, turned: bool
) -> None:
    rng = np.random.default_rng(seed)
    matrix = size * with_singular_values(rng, len(values) + extra, np.array(values))
    update_ = five((matrix.T if turned else matrix)[None])[0]
    found = np.linalg.svd(update_, compute_uv=False)
    assert found.min() > 0.6
    assert found.max() < 1.3
    u, _, vt = np.linalg.svd(matrix, full_matrices=False)
    polar = u @ vt
    inner = np.sum((polar.T if turned else polar) * update_)
    assert inner > 0.6 * len(values)  # along the polar factor: equal singular vectors


@given(seed=st.integers(0, 2**32), scale=st.floats(1e-2, 1e4))
def test_the_direction_does_not_depend_on_size_orientation_or_company(
    seed: int, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    stack = rng.standard_normal((3, 4, 6))
    alone = np.stack([orthogonalised(matrix) for matrix in stack])
    np.testing.assert_allclose(five(stack), alone, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(five(stack * scale), alone, rtol=1e-4, atol=1e-5)
    turned = np.swapaxes(five(np.swapaxes(stack, 1, 2)), 1, 2)
    np.testing.assert_allclose(turned, alone, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("shape", [(2, 48, 48), (2, 32, 96), (2, 96, 32)])
def test_bfloat16_is_no_further_from_the_definition_than_as_published(
    shape: tuple[int, int, int],
) -> None:
    stack = np.random.default_rng(7).standard_normal(shape)
    exact = torch.from_numpy(np.stack([orthogonalised(matrix) for matrix in stack]))
    turned = shape[1] > shape[2]
    x = torch.from_numpy(np.swapaxes(stack, 1, 2) if turned else stack).float()
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    x = torch.stack([published(matrix) for matrix in x])
    theirs = x.mT if turned else x
    ops = TorchOps()
    ops.matmul_dtype = "bfloat16"
    made = newton_schulz(ops, torch.from_numpy(stack).float(), None, {}, steps=5)[0]
    errors = [((one.double() - exact).norm() / exact.norm()).item() for one in (made, theirs)]
    assert errors[0] <= errors[1] < 0.05


def test_no_gradient_is_no_update() -> None:
    assert not five(np.zeros((2, 3, 4))).any()


@pytest.mark.parametrize(("shape", "factor"), [((8, 2), 2.0), ((2, 8), 1.0), ((4, 4), 1.0)])
def test_tall_updates_are_scaled(shape: tuple[int, int], factor: float) -> None:
    ones = np.ones((1, *shape))
    assert spectral(OPS, ones, None, {})[0].max() == pytest.approx(factor)
    rms = match_rms(OPS, ones, None, {})[0].max()
    assert rms == pytest.approx(0.2 * max(shape) ** 0.5)


def test_hidden_matrices_alone_follow_muon() -> None:
    plan = planned(Muon(), "model.tied=false")
    rules = {m.name: g.rule.name for g in plan.groups for m in g.members}
    for name, info in plan.parameters.items():
        hidden = name.startswith("layers.") and len(info.shape) == 2
        assert rules[name] == ("muon" if hidden else "adamw"), name
    stacks = [g for g in plan.groups if g.rule.name == "muon"]
    assert len(stacks) == len({g.shape for g in stacks})  # one stack per shape


def test_options_reach_the_plan() -> None:
    plan = planned(Muon(lr=0.5, steps=3, momentum=0.8, adjust="match_rms"))
    stages = {anchor: stage for anchor, _, stage in plan.rules["muon"].stages}
    assert dict(stages["orthogonalise"].arguments) == {"steps": 3}
    assert dict(stages["momentum"].arguments) == {"momentum": 0.8}
    assert stages["scale"].reference.endswith(":match_rms")
    assert dict(stages["decay"].arguments) == {"weight_decay": 0.1}
    peak = max(plan.values(step / 100)["muon.lr"] for step in range(1, 101))
    assert peak == pytest.approx(0.5)
    assert plan.export.layout == "llama"  # an optimizer does not change the model


def test_muon_keeps_one_moment() -> None:
    cost = {rule.name: rule for rule in planned(Muon()).estimate().rules}
    assert cost["muon"].state_bytes == 4 * cost["muon"].parameters
    assert cost["adamw"].state_bytes == 8 * cost["adamw"].parameters


def muon_values(plugin: Muon, progress: float) -> dict[str, float]:
    return {k: v for k, v in planned(plugin).values(progress).items() if k.startswith("muon.")}


def test_momentum_rises_and_falls_where_asked() -> None:
    plugin = Muon(momentum_start=0.85, momentum_rise=0.2, momentum_end=0.8, momentum_fall=0.1)
    for progress, want in (
        (0, 0.85),
        (0.1, 0.9),
        (0.2, 0.95),
        (0.9, 0.95),
        (0.95, 0.875),
        (1, 0.8),
    ):
        assert muon_values(plugin, progress)["muon.momentum"] == pytest.approx(want)
    assert muon_values(Muon(momentum_start=0.5), 1)["muon.momentum"] == 0.95
    assert "muon.momentum" not in muon_values(Muon(), 0.5)  # a constant in the compiled step


def test_scheduled_momentum_is_the_constants_where_it_stands_still() -> None:
    plan, scheduled = planned(Muon(momentum=0.9)), planned(Muon(momentum=0.9, momentum_start=0.9))
    rng = np.random.default_rng(4)
    params, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(3)]
    lrs = {"muon.lr": 0.02, "train.lr": 0.001}
    want = run(plan, params, grads, lrs)
    got = run(scheduled, params, grads, lrs | {"muon.momentum": 0.9})
    for name in params:
        np.testing.assert_array_equal(got[name], want[name])


def test_the_rate_cools_down_linearly() -> None:
    plugin = Muon(lr=0.04, cooldown=0.4, floor=0.1)
    for progress, want in ((0.01, 0.04), (0.6, 0.04), (0.8, 0.022), (1, 0.004)):
        assert muon_values(plugin, progress)["muon.lr"] == pytest.approx(want)
    assert muon_values(Muon(lr=1, cooldown=1), 0.25)["muon.lr"] == pytest.approx(0.75)


def test_decay_may_be_its_own() -> None:
    plan = planned(Muon(weight_decay=1.5), "train.weight_decay=0.3")
    decays = {
        name: dict(stage.arguments)["weight_decay"]
        for name, rule in plan.rules.items()
        for anchor, _, stage in rule.stages
        if anchor == "decay"
    }
    assert decays == {"adamw": 0.3, "muon": 1.5}


def test_a_rise_into_the_fall_is_refused() -> None:
    options: dict[str, Any] = {"momentum_start": 0.5, "momentum_rise": 0.99, "momentum_fall": 0.03}
    said = r"momentum_rise \+ momentum_fall must be below 1"
    with pytest.raises(PlanError, match=said) as caught:
        planned(Muon(momentum_end=0.6, **options))
    assert caught.value.fix == "muon.momentum_rise=0.2 muon.momentum_fall=0.03"
    planned(Muon(momentum_end=0.6, momentum_start=0.5))
    plugin = Muon(momentum_start=0.8, momentum_rise=1)  # nothing falls
    assert muon_values(plugin, 0.5)["muon.momentum"] == pytest.approx(0.875)


@pytest.mark.parametrize(
    ("name", "value", "partner"),
    [
        ("floor", 0.1, "cooldown"),
        ("momentum_rise", 0.5, "momentum_start"),
        ("momentum_fall", 0.3, "momentum_end"),
    ],
)
def test_an_option_without_its_partner_is_refused(name: str, value: float, partner: str) -> None:
    said = f"muon.{name}={value} has no effect without muon.{partner}"
    options: dict[str, Any] = {name: value}
    with pytest.raises(PlanError, match=said) as caught:
        planned(Muon(**options))
    assert caught.value.fix == f"set muon.{partner} too, or leave muon.{name} out"
    options[partner] = 0.5
    planned(Muon(**options))
