"""Tests of QK-norm against its definition, and of its purpose: the scale of q and k has no effect."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import Layers
from minillm_core.nn.node import Scope
from minillm_modded.qk_norm import Norm, QKNorm


class Sizes:
    head_dim = 8
    norm_eps = 1e-3


@pytest.mark.parametrize("gains", [False, True])
def test_each_head_has_unit_rms(node: Any, rng: Any, gains: bool) -> None:
    norm = node(Norm, geometry=Sizes, gains=gains)
    q, k = rng.standard_normal((2, 3, 4, 8)), 5 * rng.standard_normal((2, 3, 2, 8))
    for got, given, gain in zip(norm(q, k), (q, k), (norm.q, norm.k), strict=True):
        expected = given / np.sqrt((given**2).mean(-1, keepdims=True) + 1e-3)
        np.testing.assert_allclose(got, expected if gain is None else expected * gain, rtol=1e-12)


def test_the_scale_of_queries_and_keys_does_not_count(lab: Any, rng: Any) -> None:
    x = rng.standard_normal((1, 7, 32))

    def spread(*plugins: Any) -> float:
        layer = lab.model(lab.plan(*plugins)).net.layers[0].attention
        before = layer(x, Scope({}))
        layer.q.weight, layer.k.weight = 100 * layer.q.weight, 100 * layer.k.weight
        return float(np.abs(layer(x, Scope({})) - before).max())

    assert spread(QKNorm()) < 1e-4  # only epsilon
    assert spread() > 0.1


def test_gains_are_a_norms_parameters(lab: Any) -> None:
    plan = lab.plan(QKNorm(gains=True, layers=Layers([1])))
    added = [info for info in plan.parameters.values() if info.owner == "qknorm"]
    assert {info.name for info in added} == {
        "layers.1.attention.qk.qknorm.q",
        "layers.1.attention.qk.qknorm.k",
    }
    assert {(info.shape, info.role, info.wd_mul) for info in added} == {((8,), "norm", 0.0)}
    assert {info.owner for info in lab.plan(QKNorm()).parameters.values()} == {"core"}


def test_it_can_be_exported() -> None:
    assert QKNorm.manifest.export == "qwen3"
