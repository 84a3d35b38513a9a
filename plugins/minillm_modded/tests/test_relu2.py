"""Tests of ReLU squared against its definition, and of its size against the plain MLP's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import Layers
from minillm_core.config.presets import read_preset
from minillm_modded.relu2 import MLP, ReLU2


class Sizes:
    dim, layers = 6, 2


def test_the_mlp_is_its_definition(node: Any, rng: Any) -> None:
    mlp = node(MLP, geometry=Sizes, hidden=10, down_lr_mul=1.0)
    x = rng.standard_normal((2, 3, 6))
    h = np.maximum(x @ mlp.up.weight.T, 0.0)
    np.testing.assert_allclose(mlp(x), (h * h) @ mlp.down.weight.T, rtol=1e-12)
    np.testing.assert_allclose(mlp(3 * x), 9 * mlp(x), rtol=1e-12)  # homogeneous of degree 2


@pytest.mark.parametrize("hidden", [24, 640, 2048])
def test_it_is_as_large_as_the_plain_one(lab: Any, hidden: int) -> None:
    def size(plan: Any) -> int:
        return sum(p.size for p in plan.parameters.values() if p.role.startswith("mlp"))

    assert size(lab.plan(ReLU2(), hidden=hidden)) == size(lab.plan(hidden=hidden))


def test_it_is_four_times_as_wide_as_the_stream_of_gpt2() -> None:
    model = read_preset("gpt2-124m", origin="test")["model"]
    assert 3 * model["hidden"] // 2 == 4 * model["dim"]


def test_its_options_reach_the_parameters(lab: Any) -> None:
    plan = lab.plan(ReLU2(hidden=20, down_lr_mul=2.0, layers=Layers([0])))
    up, down = (plan.parameters[f"layers.0.mlp.{leaf}.weight"] for leaf in ("up", "down"))
    assert (up.shape, up.role, up.lr_mul) == ((20, 32), "mlp.up", 1.0)
    assert (down.shape, down.role, down.lr_mul) == ((32, 20), "mlp.down", 2.0)
    assert "layers.1.mlp.gate.weight" in plan.parameters
    plain = lab.plan(hidden=20).parameters["layers.0.mlp.down.weight"]
    assert down.init == plain.init
