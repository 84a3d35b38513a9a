"""Quantisation-aware training: levels, straight-through gradients, and the export."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from minillm_core import PlanError, build_plan, load
from minillm_hf import exported
from minillm_hf.qat import Rounded
from minillm_kit import run_module
from minillm_kit.check import Failed
from minillm_kit.numbers import slopes
from minillm_kit.subject import Subject

WEIGHTS = arrays(np.float64, (3, 7), elements=st.floats(-4, 4, width=32))
UNDECLARED = '''
from minillm_core import Module, Plugin


class Undeclared(Plugin, api=1):
    """Rounds, and does not say so."""

    def build_model(self, model):
        model.linear("layers.0.mlp.up", Whole)


class Whole(Module):
    def forward(self, x, weight):
        rounded = self.ops.round(weight * 8.0) / 8.0
        return self.ops.linear(x, weight + self.ops.stop_gradient(rounded - weight))
'''


@settings(max_examples=50, deadline=None)
@given(weight=WEIGHTS, bits=st.integers(2, 8))
def test_rows_have_few_levels_and_are_near(weight: np.ndarray, bits: int) -> None:
    x = np.eye(7)
    given_ = {"x": x, "weight": weight}
    product, _ = run_module(Rounded, {"bits": bits}, **given_)
    rounded, top = product.T, 2 ** (bits - 1) - 1
    for row, near in zip(weight, rounded, strict=True):
        step = max(abs(row).max(), 1e-12) / top
        assert len(np.unique(np.round(near / step))) <= 2 * top + 1
        np.testing.assert_allclose(near / step, np.round(near / step), atol=1e-6)
        assert (abs(near - row) <= step / 2 + 1e-9).all()
    np.testing.assert_allclose(Rounded(bits).folded(weight, {}), rounded, rtol=1e-6, atol=1e-12)


def test_the_gradient_of_the_rounded_weight_reaches_the_master() -> None:
    torch = pytest.importorskip("torch")
    from minillm_core.backends.torch.ops import TorchOps

    rng = np.random.default_rng(0)
    x, w = (torch.from_numpy(rng.standard_normal(s).astype(np.float32)) for s in ((5, 7), (3, 7)))
    node: Any = Rounded(3)
    node.ops = TorchOps()
    w.requires_grad_()
    node.forward(x, w).square().sum().backward()
    fixed = torch.from_numpy(Rounded(3).folded(w.detach().numpy(), {})).requires_grad_()
    (x @ fixed.T).square().sum().backward()
    torch.testing.assert_close(w.grad, fixed.grad, rtol=1e-5, atol=1e-5)


def test_what_is_exported_has_the_levels() -> None:
    sizes = {"model.layers": 2, "model.dim": 32, "model.heads": 4, "model.kv_heads": 2}
    more = {"model.hidden": 48, "model.vocab": 97, "qat.bits": 4, "qat.layers": [0]}
    plan = build_plan(load(preset="tiny", plugins="qat", settings={**sizes, **more}))
    rng = np.random.default_rng(0)
    arrays_ = {
        f"model.{name}": rng.standard_normal(info.shape).astype(np.float32)
        for name, info in plan.parameters.items()
    }
    tensors = exported(plan, arrays_)
    levels = {
        name: max(len(np.unique(row)) for row in tensor)
        for name, tensor in tensors.items()
        if name.endswith("_proj.weight")
    }
    assert all((n <= 15) == (".layers.0." in name) for name, n in levels.items())


def test_rounding_that_is_not_declared_is_found(tmp_path: Any) -> None:
    pytest.importorskip("torch")
    (tmp_path / "mine.py").write_text(UNDECLARED)
    spec = f"{tmp_path / 'mine.py'}:Undeclared"
    with pytest.raises(Failed, match="slope"):
        slopes(Subject(spec, backend="torch"))
    (tmp_path / "mine.py").write_text(UNDECLARED.replace("api=1)", "api=1, surrogate=True)"))
    assert slopes(Subject(spec, backend="torch")).startswith("21 parameters")


def test_a_leaf_has_one_product() -> None:
    with pytest.raises(PlanError, match="claimed by both 'lora' and 'qat'"):
        build_plan(load(preset="tiny", plugins="lora,qat"))
