"""Tests of attention in blocks with MLX's own products: results against float64, and memory."""

from __future__ import annotations

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
import numpy as np

from minillm_core.backends.mlx.ops import sdpa
from minillm_metal import exact
from minillm_metal.kernels.blocks import attention


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [None, 1, 9, 100, "array"])
@pytest.mark.parametrize("shape", [(2, 37, 37, 4, 2, 6), (1, 5, 29, 3, 3, 8)])
def test_it_is_float64s(
    shape: tuple[int, ...], window: int | str | None, documents: bool, dtype: mx.Dtype
) -> None:
    B, T, S, H, K, D = shape
    rng = np.random.default_rng(0)
    arrays = [exact.rounded(rng, dtype, B, *s, D) for s in ((T, H), (S, K), (S, K), (T, H))]
    (*given, up), (*wide, dy) = zip(*arrays, strict=True)
    ids = rng.integers(0, 2, (B, S)).astype(np.int32) if documents else None
    number = 9 if window == "array" else window
    asked = {
        "window": mx.array(9) if window == "array" else window,
        "documents": None if ids is None else mx.array(ids),
    }
    y, gradients = exact.pulled(lambda q, k, v: [attention(q, k, v, block=8, **asked)], given, up)
    wanted = exact.attention(*wide, dy, number, ids)
    for got, want in zip((y, *gradients), wanted, strict=True):
        exact.close("attention", dtype, got, want)


def test_it_keeps_its_memory_promise() -> None:
    """A quarter of the scores of MLX's own, forward and backward; the saving grows with the row length."""
    rng, T = np.random.default_rng(0), 1024
    arrays = [exact.rounded(rng, mx.float32, 1, T, 4, 16)[0] for _ in range(4)]
    scores = 4 * T * T * 4  # bytes

    def peak(function: object, **more: int) -> int:
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        exact.pulled(lambda q, k, v: [function(q, k, v, window=64, **more)], arrays[:3], arrays[3])  # type: ignore
        return mx.get_peak_memory() - before

    whole, blocks = peak(sdpa), peak(attention, block=64)
    assert whole > scores
    assert blocks < scores / 2
    assert blocks < whole / 4
