"""Tests of the author's helpers: one module and one step, against known results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm_core import Buffer, Geometry, Linear, Module, Param, Refusal, State, ones, zeros
from minillm_kit import GEOMETRY, numpy_ops, one_step, run_module
from minillm_kit.check import NotApplicable
from minillm_kit.numbers import on_host

LOSS = '''
from minillm_core import Plugin, option

class Penalty(Plugin, api=1):
    """A z-loss."""

    weight: float = option(0.05, help="of it")

    def compute_loss(self, loss):
        loss.logits(z=self.weight)
'''


HEATED = '''
from minillm_core import Module, Param, Plugin, ones
from minillm_core.documents import Segment

class Heated(Plugin, api=1):
    """Adds what a field of the source says."""

    def build_data(self, data):
        data.source(words, fields={"heat": "float32", "kind": "int32"})

    def build_model(self, model):
        model.embed.mix(Heat)

class Heat(Module):
    def __init__(self, geometry):
        super().__init__()
        self.scale = Param((geometry.dim,), init=ones, role="embedding.heat")

    def forward(self, x, heat):
        return x + self.ops.expand_dims(heat, -1) * self.scale

def words(files, reading):
    for file in files:
        yield [Segment("word", {"heat": 0.5, "kind": 1})]
'''


class Everything(Module):
    """A module with one of each declaration: x (B, T, C), ids (B, T)."""

    def __init__(self, geometry: Geometry, scale: float) -> None:
        super().__init__()
        self.inner = Linear(geometry.dim, 3, role="gate", init=zeros)
        self.weight = Param((3,), init=ones, role="scalar")
        self.level = State((3,), zeros)
        self.table = Buffer((3,), lambda: np.array([1.0, 2.0, 3.0], np.float32))
        self.scale = scale

    def forward(self, x: Any, ids: Any) -> Any:
        """Return (B, T, 3)."""
        y = self.weight * self.inner(x) + self.level + self.table
        return self.scale * y * self.ops.expand_dims(ids, -1)


def test_a_module_is_computed_from_the_weights_that_are_told() -> None:
    rng = np.random.default_rng(0)
    x, ids = rng.standard_normal((2, 4, GEOMETRY.dim)), rng.integers(0, 9, (2, 4))
    got, weights = run_module(Everything, {"scale": 0.5}, ids=ids, x=x.astype(np.float32))
    assert weights.keys() == {"inner.weight", "weight", "level"}
    assert all(np.all(w != 0) and np.all(w != 1) and w.dtype == float for w in weights.values())
    inner = x.astype(np.float32) @ weights["inner.weight"].T
    want = 0.5 * (weights["weight"] * inner + weights["level"] + [1, 2, 3]) * ids[..., None]
    np.testing.assert_allclose(got, want, rtol=1e-12)
    assert got.dtype == np.float64


def test_arguments_of_the_constructor_are_told_from_those_of_forward() -> None:
    with pytest.raises(Refusal) as refused:
        run_module(Everything, scale=0.5, x=1.0, ids=1)
    assert "Everything.forward takes x, ids, not scale, x, ids" in refused.value.what
    assert "run_module(Everything, {'scale': ...}, x=..., ids=...)" in str(refused.value.fix)
    with pytest.raises(Refusal) as refused:
        run_module(Everything, {"scale": 0.5}, y=1.0)
    assert "forward's arguments by name" in str(refused.value.fix)


def test_a_geometry_of_one_s_own_is_taken() -> None:
    narrow = Geometry(1, 6, 2, 1, 3, 8, 11, 5)
    x, ids = np.ones((1, 2, 6)), np.ones((1, 2), int)
    _, weights = run_module(Everything, {"geometry": narrow, "scale": 1.0}, x=x, ids=ids)
    assert weights["inner.weight"].shape == (3, 6)


def test_inputs_are_given_by_their_names() -> None:
    with pytest.raises(Refusal, match="takes x, ids, not x"):
        run_module(Everything, {"scale": 1.0}, x=np.ones((1, 1, 32)))


def test_ops_are_numpy_s() -> None:
    assert numpy_ops().tanh(np.ones(2)).tolist() == np.tanh([1.0, 1.0]).tolist()


def test_a_step_is_all_that_went_in_and_came_out(tmp_path: Path) -> None:
    (tmp_path / "penalty.py").write_text(LOSS)
    spec = f"{tmp_path / 'penalty.py'}:Penalty"
    steps = [one_step(spec, backend=backend) for backend in ("torch", "mlx")]
    for step in steps:
        labels = step.batch["labels"]
        logits = step.hidden @ step.head.T  # (B, T, V)
        lse = np.log(np.exp(logits).sum(-1))
        target = np.take_along_axis(logits, np.maximum(labels, 0)[..., None], -1)[..., 0]
        losses = (lse - target + 0.05 * lse**2)[labels >= 0]
        assert step.loss == pytest.approx(losses.mean(), rel=1e-5)
        assert step.before.keys() == step.after.keys() == step.gradients.keys()
        assert any(np.any(step.before[name] != step.after[name]) for name in step.before)
    first, second = steps
    for name, before in first.before.items():
        np.testing.assert_array_equal(before, second.before[name])
        size = np.linalg.norm(first.gradients[name])
        assert np.linalg.norm(first.gradients[name] - second.gradients[name]) <= 1e-4 * size + 1e-7


def test_fields_of_a_source_have_values(tmp_path: Path) -> None:
    (tmp_path / "heated.py").write_text(HEATED)
    step = one_step(f"{tmp_path / 'heated.py'}:Heated", backend="torch")
    assert 0 < np.mean(step.batch["heat"]) < 1
    assert set(np.unique(step.batch["kind"])) == {0, 1}
    assert step.batch["target_heat"].shape == step.batch["ids"].shape
    (gradient,) = (one for name, one in step.gradients.items() if "heated" in name)
    assert np.any(gradient != 0)


def test_a_backend_that_a_plugin_does_not_have_says_so(tmp_path: Path) -> None:
    (tmp_path / "penalty.py").write_text(LOSS.replace("api=1", 'api=1, backends=("torch",)'))
    with pytest.raises(NotApplicable, match="does not support mlx"):
        one_step(f"{tmp_path / 'penalty.py'}:Penalty", backend="mlx")


def test_bits_of_bfloat16_are_read_as_numbers() -> None:
    bits = np.array([0x3F80, 0xC000 - 0x10000, 0], np.int16)  # 1, -2, 0
    assert on_host(bits).tolist() == [1.0, -2.0, 0.0]
    assert on_host(np.array([-127, 3], np.int8)).tolist() == [-127.0, 3.0]
