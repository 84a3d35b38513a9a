"""Tests of a source's fields: read by name in nodes, as weights and masks in the loss, on both frameworks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm_core import Module, Param, Plugin, build_plan, load, ones
from minillm_core.data import Loader, open_corpus
from minillm_core.documents import Segment
from minillm_core.inspection import trainer
from minillm_core.plugins.manager import LoadedPlugin

FIELDS = {"role": "int32", "weights": "float32"}


def weighed(files: Any, reading: Any, *, uniform: bool) -> Any:
    for n in range(60):
        asked, answered = np.arange(n % 5 + 2) + 3, np.arange(n % 7 + 2) + 20
        weight = 1.0 if uniform else np.linspace(0.25, 2.0, len(answered))
        yield [Segment(asked, {"role": 1}), Segment(answered, {"role": 2, "weights": weight})]


class Weighed(Plugin, api=1):
    """Reads roles in the embedding."""

    def build_data(self, data: Any) -> None:
        data.source(weighed, fields=FIELDS, files=False, uniform=False)

    def build_model(self, model: Any) -> None:
        model.embed.mix(Roles)


class Roles(Module):
    """A node with x (B, T, C), role and target_role int32 (B, T) -> x (B, T, C)."""

    def __init__(self, geometry: Any) -> None:
        super().__init__()
        self.scale = Param((geometry.dim,), init=ones, role="scalar")

    def forward(self, x: Any, role: Any, target_role: Any) -> Any:
        both = self.ops.astype(role + 2 * target_role, "float32")
        return x * (self.scale + 0.1 * self.ops.expand_dims(both, -1))


@pytest.fixture
def batch(tmp_path: Path) -> tuple[Any, Any]:
    settings = {"train.steps": 4, "train.seq_len": 16, "model.layers": 1, "model.dim": 32}
    settings |= {"model.heads": 2, "model.kv_heads": 2, "model.vocab": 64, "train.dtype": "float32"}
    config = load("tiny", settings=settings).config
    plan = build_plan(config, [LoadedPlugin.of("weighed", Weighed())])
    given = {"cache": tmp_path, "say": lambda line: None, "asked": plan.sourcing}
    corpus = open_corpus(config.data, 64, 16, **given)
    with Loader(corpus.train, rows=4, accumulate=1, seq_len=16, seed=0) as loader:
        return plan, next(loader)


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_step_reads_roles_and_weights(batch: tuple[Any, Any], backend: str) -> None:
    plan, step = batch
    assert {"role", "target_role", "weights"} <= set(plan.fields)
    losses = {}
    micro = step.micro[0]
    others = {
        "as it is": micro,
        "other roles": {**micro, "role": 3 - micro["role"]},
        "other targets": {**micro, "target_role": 0 * micro["target_role"]},
    }
    for name, one in others.items():
        made = trainer(plan, backend)
        losses[name] = made.read(made.step([one], plan.values(0.5), step.supervised)).loss
    assert len({round(loss, 5) for loss in losses.values()}) == 3
    # weights count in the gradients: doubling the weights of half as many positions is another step
    half = {**micro, "weights": np.where(np.arange(16) < 8, 2 * micro["weights"], 0).astype("f4")}
    steps = []
    for one in (micro, half):
        made = trainer(plan, backend)
        made.read(made.step([one], plan.values(0.5), step.supervised))
        steps.append(made.arrays()["model.head.weight"])
    assert not np.allclose(*steps, atol=1e-6)


def test_both_frameworks_make_the_same_step(batch: tuple[Any, Any]) -> None:
    plan, step = batch
    found = []
    for backend in ("torch", "mlx"):
        made = trainer(plan, backend)
        result = made.read(made.step(step.micro, plan.values(0.5), step.supervised))
        found.append((result.loss, made.arrays()["model.head.weight"]))
    (loss, head), (other, same) = found
    assert loss == pytest.approx(other, rel=1e-5)
    np.testing.assert_allclose(head, same, atol=2e-5)
