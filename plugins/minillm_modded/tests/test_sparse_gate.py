"""Tests of each head's gate against its definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import Layers
from minillm_core.errors import PlanError
from minillm_modded.sparse_gate import Gate, SparseGate


class Sizes:
    heads = 3


def test_each_head_is_multiplied_by_its_gate(node: Any, rng: Any) -> None:
    gate = node(Gate, geometry=Sizes, width=4, lr_mul=1.0)
    y, x = rng.standard_normal((2, 5, 3, 6)), rng.standard_normal((2, 5, 18))
    got = gate(y, x)
    for head in range(3):
        opened = 1 / (1 + np.exp(-x[..., :4] @ gate.gate.weight[head]))
        np.testing.assert_allclose(got[..., head, :], opened[..., None] * y[..., head, :])
    moved = x.copy()
    moved[..., 4:] += 1.0
    np.testing.assert_array_equal(gate(y, moved), got)  # the other features are not read


def test_every_gate_is_half_open_at_first(lab: Any, rng: Any) -> None:
    x = rng.standard_normal((1, 5, 32))
    ours, plain = (lab.model(lab.plan(*p), moved=False) for p in ((SparseGate(),), ()))
    np.testing.assert_allclose(ours.attention(0, x), plain.attention(0, x) / 2, rtol=1e-12)


def test_it_reads_no_more_than_there_is(lab: Any) -> None:
    for head_dim in (4, None, 16):  # the stream's width does not depend on it
        assert lab.plan(SparseGate(width=32), head_dim=head_dim)
        with pytest.raises(PlanError, match="sparse_gate reads 33 features of a stream of 32"):
            lab.plan(SparseGate(width=33), head_dim=head_dim)


def test_its_gates_are_neither_decayed_nor_orthogonalised(lab: Any) -> None:
    plan = lab.plan(SparseGate(layers=Layers([2]), lr_mul=0.5))
    (gate,) = (info for info in plan.parameters.values() if info.owner == "sparsegate")
    assert gate.name == "layers.2.attention.out.sparsegate.gate.weight"
    assert (gate.shape, gate.role, gate.lr_mul, gate.wd_mul) == ((4, 12), "gate", 0.5, 0.0)
