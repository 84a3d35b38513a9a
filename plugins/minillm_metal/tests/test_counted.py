"""Tests of MLX's graphs of the composed ops and of AdamW, which the README's byte counts assume."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from minillm_core import LossForm, Rotary, TanhCap
from minillm_core.backends.mlx import loss, ops
from minillm_core.optim.adamw import adam, decay, write

SMALL = ("Reshape", "Transpose", "Squeeze", "ExpandDims", "Broadcast", "Full", "Arange", "Gather")
"""Kernels of views, rows or scalars: they read or write no logit, feature or parameter."""


def kernels(folder: Path, function: Any, *given: mx.array) -> list[str]:
    """List the kernels that a compiled function launches, in order; without those that move almost nothing."""
    mx.eval(given)
    path = folder / "graph.dot"
    mx.export_to_dot(str(path), *mx.compile(function)(*given))
    return [one for one in re.findall(r'label ="([^"]*)"', path.read_text()) if one not in SMALL]


def test_adamw_is_one_kernel_of_mlx(tmp_path: Path) -> None:
    """It reads update, weight and moments, and writes weight, moments and copy: nothing can be saved."""

    def step(p: mx.array, u: mx.array, m: mx.array, v: mx.array, lr: mx.array, n: mx.array) -> Any:
        o = ops.MLXOps()
        u, state = adam(o, u, p, {"m": m, "v": v}, beta1=0.9, beta2=0.95, epsilon=1e-8, updates=n)
        u, _ = decay(o, u, p, {}, weight_decay=0.1, wd_mul=1.0)
        p, _ = write(o, u, p, {}, lr=lr, lr_mul=1.0)
        return p, state["m"], state["v"], p.astype(mx.bfloat16)

    x = [mx.zeros((30, 20)) for _ in range(4)]
    (fused, *numbers) = sorted(kernels(tmp_path, step, *x, mx.array(1.0), mx.array(2.0)), key=len)[
        ::-1
    ]
    assert fused.startswith("Compiled")
    assert fused.endswith("AsType")
    assert set(numbers) <= {"Multiply"}  # of two scalars


def test_the_losss_chunks_are_five_passes(tmp_path: Path) -> None:
    """Cap (or cast), log-sum-exp, its subtraction, and the gradient: 18 to 22 bytes per logit."""
    h, w = mx.zeros((64, 16), mx.bfloat16), mx.zeros((512, 16), mx.bfloat16)
    ids, scale = mx.zeros((1, 64), mx.int32), mx.ones((1, 64))
    for form, first in ((LossForm(), "AsType"), (LossForm(TanhCap(15.0)), "CompiledAsType")):

        def walk(h: mx.array, w: mx.array, form: LossForm = form) -> Any:
            return loss._walk(h, w, ids, scale, form, 64)

        found = kernels(tmp_path, walk, h, w)
        of_logits = found[1 : found.index("Matmul", 1)]
        assert of_logits[0].startswith(first)
        assert of_logits[1:3] == ["LogSumExp", "CompiledBroadcastSubtract"]
        assert of_logits[-1].startswith("CompiledExp")


def test_the_tables_rotation_is_six_passes(tmp_path: Path) -> None:
    q = mx.zeros((2, 8, 2, 16), mx.bfloat16)
    positions = mx.zeros((2, 8), mx.int32)
    cos, sin = mx.zeros((8, 8)), mx.zeros((8, 8))
    mx.eval(cos, sin, positions)
    table = Rotary(cos, sin, mx.ones((8,)), positions)
    found = kernels(tmp_path, lambda q: ops.rotate(q, q, table)[:1], q)
    assert [one[:8] for one in found if one != "Split"] == [
        *("AsType", "AsType", "Compiled", "Compiled", "Concaten", "AsType")
    ]
