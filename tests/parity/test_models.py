"""Tests of the whole model on every framework: equal initial values, losses and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core.backends.base import lone_row
from minillm_core.nn.module import declared
from minillm_core.nn.param import Param
from minillm_kit import materialise

pytest.importorskip("torch")
pytest.importorskip("mlx.core")

MODELS = {
    "plain": ((), {}),
    "tied": ((), {"model_tied": True, "model_kv_heads": 4, "train_seq_len": 64}),
    "both": (("muon", "paired_heads"), {}),
}
H = 1e-4
BATCH = 11
"""A seed: for a tied model, rounding errors of some batches are half as large as those of others."""


@pytest.fixture(params=MODELS)
def plan(request: pytest.FixtureRequest, lab: Any) -> Any:
    names, settings = MODELS[request.param]
    return lab.plan(*names, train_clip=0.0, **settings)


def test_initial_weights_are_bit_equal(lab: Any, plan: Any) -> None:
    ours, theirs = (
        {n: v for n, v in lab.trainer(plan, name, seed=3).arrays().items() if "random." not in n}
        for name in ("torch", "mlx")
    )
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype
        assert value.tobytes() == theirs[name].tobytes(), name
    drawn = [v.tobytes() for n, v in ours.items() if n.startswith("model.") and v.ndim == 2]
    assert len(set(drawn)) == len(drawn)  # each parameter has its own random stream


def test_losses_are_equal(lab: Any, plan: Any) -> None:
    batch = lab.batch(plan, unsupervised=3)
    count = lab.supervised([batch])
    exact, predictions = materialise(plan, 0).evaluate(batch, lab.values_of(plan, [batch]))
    objective = materialise(plan, 0)(batch, lab.values_of(plan, [batch])).objective
    assert predictions == count
    assert float(objective) == pytest.approx(exact / count, rel=1e-12)
    for name in ("torch", "mlx"):
        run = lab.trainer(plan, name)
        nats, predictions = run.evaluate([batch])
        assert predictions == count
        assert nats == pytest.approx(exact, rel=1e-6)
        assert lab.losses(run, plan, [[batch]])[0] == pytest.approx(exact / count, rel=1e-6)


def test_next_logits_are_equal(lab: Any, plan: Any) -> None:
    row = lone_row(lab.batch(plan)["ids"][0, :11])
    ours, theirs = (lab.trainer(plan, name).next_logits(row) for name in ("torch", "mlx"))
    assert ours.shape == (plan.config.model.vocab,)
    assert ours.dtype == theirs.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_gradients_are_equal(lab: Any, plan: Any) -> None:
    assert_gradients_equal(lab, plan)


@pytest.mark.parametrize("names", [(), ("paired_heads",)], ids=["plain", "paired_heads"])
def test_gradients_of_preset_tiny_are_equal(lab: Any, names: tuple[str, ...]) -> None:
    plan = lab.tiny(*names, train_clip=0.0, train_seq_len=64)
    assert_gradients_equal(lab, plan, rare_first=True)


def assert_gradients_equal(lab: Any, plan: Any, **options: bool) -> None:
    micro = [lab.batch(plan, BATCH, unsupervised=3, **options)]
    _, ours = lab.gradients(lab.trainer(plan, "torch"), plan, micro)
    _, theirs = lab.gradients(lab.trainer(plan, "mlx"), plan, micro)
    _, exact = lab.exact_gradients(plan, micro)
    lab.assert_gradients(ours, exact, overall=1e-6)
    lab.assert_gradients(theirs, exact, overall=1e-6)
    lab.assert_gradients(theirs, ours, overall=1e-6)


def test_the_oracle_follows_central_differences(lab: Any, plan: Any) -> None:
    micro = [lab.batch(plan, unsupervised=3)]
    objective, exact = lab.exact_gradients(plan, micro)
    model, values, rng = materialise(plan, 0), lab.values_of(plan, micro), np.random.default_rng(5)

    def loss() -> float:
        return float(model(micro[0], values).objective)

    assert loss() == pytest.approx(objective, rel=1e-12)
    for name, module, attribute, _ in declared(model, Param):
        start = getattr(module, attribute)
        direction = rng.standard_normal(start.shape)
        ends = []
        for sign in (1, -1):
            setattr(module, attribute, start + sign * H * direction)
            ends.append(loss())
        setattr(module, attribute, start)
        slope = (ends[0] - ends[1]) / (2 * H)
        size = np.linalg.norm(exact[name]) * np.linalg.norm(direction)
        assert abs(slope - (exact[name] * direction).sum()) <= 1e-5 * size, name
