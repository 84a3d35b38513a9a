"""Tests of one update rule in all implementations: fused or in stages, on either framework."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import INHERITED, Module, Normal, Param, Plugin, piecewise, plateaus, stage
from minillm_core.errors import PluginCodeError

torch = pytest.importorskip("torch")
pytest.importorskip("mlx.core")

BACKENDS = ["torch", "mlx"]


class Overrides(Plugin, api=1):
    """Sets factors and betas for some parameters."""

    frozen: bool = False
    scheduled: bool = False

    def optimizer_factory(self, optimizer: Any) -> None:
        half = plateaus((0, 0.0), (0.5, 0.5)) if self.scheduled else 0.5
        rising = piecewise((0, 0.0), (1, 3.0)) if self.scheduled else 3.0
        optimizer.set(lambda name, p: p.role == "attention.q", lr_mul=half)
        optimizer.set(lambda name, p: p.role == "mlp.down", wd_mul=rising)
        optimizer.set(lambda name, p: p.role == "embedding.token", betas=(0.8, 0.99))
        optimizer.set(lambda name, p: p.role == "norm", lr_mul=0.0 if self.frozen else 2.0)


def written(ops: Any, update: Any, param: Any, state: Any, *, lr: Any, lr_mul: Any) -> Any:
    moved = param - update * (lr * lr_mul)
    return moved, {"mean": state["mean"] * 0.5 + moved * 0.5}


class Writes(Plugin, api=1):
    """Replaces AdamW's write, like an average of the weights."""

    every: bool = False

    def optimizer_factory(self, optimizer: Any) -> None:
        own = stage(written, state={"mean": "like"}, lr=INHERITED)
        optimizer.extend("*" if self.every else "adamw", "write", own)


def narrow(ops: Any, update: Any, param: Any, state: Any) -> Any:
    return update, {"m": ops.astype(state["m"] * 0.5 + update, "bfloat16")}


class Narrow(Plugin, api=1):
    """Keeps state that checkpoints do not support."""

    def optimizer_factory(self, optimizer: Any) -> None:
        optimizer.extend("adamw", "scale", stage(narrow, state={"m": "like"}))


def remembered(ops: Any, update: Any, param: Any, state: Any) -> Any:
    return update, {"last": param, "older": state["last"]}


class Remembers(Plugin, api=1):
    """Keeps the weights before the last update, and those before the one before it."""

    def optimizer_factory(self, optimizer: Any) -> None:
        kept = stage(remembered, state={"last": "like", "older": "like"})
        optimizer.extend("adamw", "scale", kept)


def adamw_by_hand(
    weights: dict[str, np.ndarray],
    grads: list[dict[str, np.ndarray]],
    plan: Any,
    rates: list[float],
    factors: Any,
) -> dict[str, np.ndarray]:
    """Apply AdamW in float64 to given gradients: arXiv:1711.05101, algorithm 2."""
    found = {}
    for name, start in weights.items():
        p, m, v = start.astype(np.float64), 0.0, 0.0
        for t, (grad, lr) in enumerate(zip(grads, rates, strict=True), start=1):
            (beta1, beta2), lr_mul, wd_mul = factors(name, t - 1)
            m = beta1 * m + (1 - beta1) * grad[name]
            v = beta2 * v + (1 - beta2) * grad[name] ** 2
            update = (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + 1e-8)
            p = p - lr * lr_mul * (update + plan.config.train.weight_decay * wd_mul * p)
        found[name] = p
    return found


def weights_of(run: Any) -> dict[str, np.ndarray]:
    return {
        name.removeprefix("model."): value
        for name, value in run.arrays().items()
        if name.startswith("model.")
    }


class Two(Module):
    """A scale that is the sum of two parameters, whose gradients are one array."""

    def __init__(self, geometry: Any) -> None:
        super().__init__()
        self.a = Param((geometry.head_dim,), init=Normal(0.1), role="scalar")
        self.b = Param((geometry.head_dim,), init=Normal(0.1), role="scalar")

    def forward(self, y: Any) -> Any:
        return y * (1.0 + self.a + self.b)  # (B, T, H, D)


class Doubled(Plugin, api=1):
    """Such a scale in a layer."""

    def build_attention(self, attn: Any) -> None:
        attn.out.gate(Two)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_parameters_that_are_added_have_the_same_update(lab: Any, backend: str, parts: int) -> None:
    plan = lab.plan(plugins={"doubled": Doubled()}, train_rows=2, train_clip=0.01)
    run, steps = lab.trainer(plan, backend), [lab.split(lab.batch(plan), parts)]
    lab.losses(run, plan, steps)
    moments = first_moments(run)
    pairs = [(name, name[:-1] + "b") for name in moments if name.endswith(".a")]
    assert pairs
    for a, b in pairs:
        assert np.linalg.norm(moments[a]) > 0
        np.testing.assert_allclose(moments[a], moments[b], rtol=1e-6)


def first_moments(run: Any) -> dict[str, np.ndarray]:
    prefix = "optimizer.precondition.m."
    return {
        name.removeprefix(prefix): value.astype(np.float64)
        for name, value in run.arrays().items()
        if name.startswith(prefix)
    }


@pytest.mark.parametrize(
    "names", [(), ("muon",), ("muon", "layer_clip")], ids=["plain", "muon", "norms of layers"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fused_adamw_is_the_rule_in_stages(lab: Any, names: tuple[str, ...], dtype: str) -> None:
    clipped = {"layer_clip.rules": '["muon"]', "layer_clip.most": 0.01, "train_clip": 0.1}
    plan = lab.plan(*names, train_dtype=dtype, train_lr=3e-3, **clipped if names[1:] else {})
    steps = [[lab.batch(plan, seed)] for seed in range(10)]
    runs = [lab.trainer(plan, fused=fused) for fused in (True, False)]
    ours, theirs = (lab.losses(run, plan, steps) for run in runs)
    np.testing.assert_allclose(ours, theirs, atol=1e-5 if dtype == "float32" else 2e-3)
    if dtype == "float32":
        for name, value in runs[0].arrays().items():
            other = runs[1].arrays()[name]
            assert np.linalg.norm(value - other) <= 1e-4 * np.linalg.norm(other) + 1e-9, name
    seen = [{k for k in run.witnesses() if k.startswith("stage:")} for run in runs]
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("names", "fused", "said"),
    [
        ((), True, ["the rule adamw is torch's fused kernel"]),
        (("muon",), True, ["the rule adamw is torch's fused kernel"]),
        (
            ("cautious_wd",),
            True,
            ["the rule adamw is not torch's fused kernel: cautious_wd changed it"],
        ),
        (("writes",), True, ["the rule adamw is not torch's fused kernel: writes changed it"]),
        (
            ("scheduled",),
            True,
            [
                "the rule adamw is torch's fused kernel, but for 2 parameters whose weight decay "
                "has a schedule"
            ],
        ),
        ((), False, []),
    ],
)
def test_it_is_said_what_adamw_is_in_this_run(
    lab: Any, names: tuple[str, ...], fused: bool, said: list[str]
) -> None:
    mine = {"writes": Writes(), "scheduled": Overrides(scheduled=True)}
    plugins = {name: mine[name] for name in names if name in mine}
    plan = lab.plan(*(name for name in names if name not in mine), plugins=plugins)
    run = lab.trainer(plan, fused=fused)
    assert [note for note in run.binding.notes if "adamw" in note] == said
    assert bool(run.optimizer.fused) == (" not " not in "".join(said) and fused)


@pytest.mark.parametrize(
    ("backend", "options"),
    [("torch", {"fused": True}), ("torch", {"fused": False}), ("mlx", {})],
    ids=["torch-fused", "torch-stages", "mlx"],
)
@pytest.mark.parametrize("overridden", ["", "by numbers", "by schedules"])
def test_updates_are_those_of_the_paper(
    lab: Any, backend: str, options: dict[str, Any], overridden: str
) -> None:
    scheduled = overridden == "by schedules"
    plugins = {"overrides": Overrides(scheduled=scheduled)} if overridden else {}
    shares = [0.2, 0.5, 0.6, 1.0] if scheduled else [0.05, 0.1, 0.15, 0.2]
    plan = lab.plan(plugins=plugins, train_clip=0.0, train_lr=3e-3)
    run = lab.trainer(plan, backend, **options)
    start, grads, rates = weights_of(run), [], []

    def factors(name: str, index: int = 0) -> tuple[tuple[float, float], float, float]:
        info = plan.parameters[name]
        betas, lr_mul, wd_mul = plan.config.train.betas, 1.0, info.wd_mul
        if overridden:
            betas = (0.8, 0.99) if info.role == "embedding.token" else betas
            half = 0.0 if scheduled and shares[index] <= 0.5 else 0.5
            lr_mul = {"attention.q": half, "norm": 2.0}.get(info.role, 1.0)
            rising = 3.0 * shares[index] if scheduled else 3.0
            wd_mul = rising if info.role == "mlp.down" else wd_mul
        return betas, lr_mul, wd_mul

    held = {name: np.zeros(value.shape) for name, value in start.items()}
    for index, share in enumerate(shares):
        values = plan.values(share)
        batch = lab.batch(plan, index)
        run.read(run.step([batch], values, lab.supervised([batch])))
        rates.append(values["train.lr"])
        moments = first_moments(run)
        beta1 = {name: factors(name)[0][0] for name in moments}
        grads.append({n: (m - beta1[n] * held[n]) / (1 - beta1[n]) for n, m in moments.items()})
        held = moments
    expected = adamw_by_hand(start, grads, plan, rates, factors)
    for name, value in weights_of(run).items():
        moved = np.linalg.norm(expected[name] - start[name])
        assert moved > 0
        assert np.linalg.norm(value - expected[name]) <= 2e-3 * moved, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_factor_of_zero_freezes(lab: Any, backend: str) -> None:
    plan = lab.plan("muon", plugins={"overrides": Overrides(frozen=True)}, train_lr=1e-2)
    run = lab.trainer(plan, backend)
    start = weights_of(run)
    lab.losses(run, plan, [[lab.batch(plan, seed)] for seed in range(3)])
    for name, value in weights_of(run).items():
        changed = (value != start[name]).any()
        assert changed != (plan.parameters[name].role == "norm"), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_factors_within_a_stack(lab: Any, backend: str) -> None:
    """Muon stacks q and o; q alone has half the learning rate, or none in the first half of the run."""
    made = ({}, {"overrides": Overrides()}, {"overrides": Overrides(scheduled=True)})
    plans = [lab.plan("muon", plugins=each) for each in made]
    moved = []
    for plan in plans:
        run = lab.trainer(plan, backend)
        start = weights_of(run)
        lab.losses(run, plan, [[lab.batch(plan)]])
        moved.append({n: v.astype(np.float64) - start[n] for n, v in weights_of(run).items()})
    assert not any(change.any() for name, change in moved[2].items() if ".q." in name)
    assert all(change.any() for name, change in moved[2].items() if ".o." in name)
    for part, factor in (("q", 0.5), ("o", 1.0)):
        name = f"layers.1.attention.{part}.weight"
        difference = np.linalg.norm(moved[1][name] - factor * moved[0][name])
        assert difference <= 1e-4 * np.linalg.norm(moved[0][name]), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("every", [False, True])
def test_a_write_of_a_plugins_own_trains_as_adamw(lab: Any, backend: str, every: bool) -> None:
    names = ("muon",) if every else ()
    plans = [lab.plan(*names), lab.plan(*names, plugins={"writes": Writes(every=every)})]
    steps = [[lab.batch(plans[0], seed)] for seed in range(3)]
    plain, own = (lab.losses(lab.trainer(plan, backend), plan, steps) for plan in plans)
    assert all("train.lr" in plan.values(0.5) for plan in plans)  # reported in every step
    np.testing.assert_allclose(own, plain, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_state_of_another_dtype_is_refused_at_the_first_step(lab: Any, backend: str) -> None:
    plan = lab.plan(plugins={"narrow": Narrow()})
    run = lab.trainer(plan, backend)
    with pytest.raises(PluginCodeError) as caught:
        lab.losses(run, plan, [[lab.batch(plan)]])
    said = "plugin 'narrow' returned state 'm' of bfloat16 from narrow"
    assert (caught.value.what, caught.value.where) == (said, "adamw.scale, state 'm'")
    assert "ops.astype(m, 'float32')" in (caught.value.fix or "")


@pytest.mark.parametrize("backend", [*BACKENDS, pytest.param("compiled", marks=pytest.mark.slow)])
def test_state_that_is_an_argument_keeps_its_value(
    lab: Any, backend: str, aot_trainer: Any
) -> None:
    compiled = backend == "compiled"
    plan = lab.plan(plugins={"remembers": Remembers()}, train_compile="on" if compiled else "off")
    run = aot_trainer(plan) if compiled else lab.trainer(plan, backend)
    before = []
    for seed in range(3):
        before.append({name: value.copy() for name, value in weights_of(run).items()})
        lab.losses(run, plan, [[lab.batch(plan, seed)]])
    held = run.arrays()
    for entry, step in (("last", 2), ("older", 1)):
        for name, value in before[step].items():
            np.testing.assert_array_equal(held[f"optimizer.scale.{entry}.{name}"], value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_clipping_bounds_the_gradient(lab: Any, backend: str) -> None:
    plans = {clip: lab.plan(train_clip=clip) for clip in (0.0, 0.05)}
    batch, found = lab.batch(plans[0.0]), {}
    for clip, plan in plans.items():
        run = lab.trainer(plan, backend)
        norm = run.read(run.step([batch], plan.values(0.5), lab.supervised([batch]))).grad_norm
        found[clip] = (
            norm,
            np.hypot.reduce([np.linalg.norm(m) for m in first_moments(run).values()]),
        )
    share = 1 - plans[0.0].config.train.betas[0]
    assert found[0.05][0] == pytest.approx(found[0.0][0], rel=1e-6)  # before clipping
    assert found[0.0][1] / share == pytest.approx(found[0.0][0], rel=1e-5)
    assert found[0.05][1] / share == pytest.approx(0.05, rel=1e-4)
    assert found[0.0][0] > 0.1
