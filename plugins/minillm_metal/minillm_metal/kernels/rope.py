"""Rotary position embedding from the table, at any positions: q and k are read and written once.

MLX's composed form splits, joins and casts, which its compiler does not fuse.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from minillm_core import Rotary
from minillm_metal.kernel import Kernel

__all__ = ["ROTATE", "rotate"]

ROTATE = Kernel("rotate", ("x", "cosines", "sines", "positions", "sizes"), ("y",))
THREADS = 128


def rotate(q: mx.array, k: mx.array, table: Rotary) -> tuple[mx.array, mx.array]:
    """Rotate q (B, T, H, D) and k (B, T, K, D) by their position's angles; float32 inside."""
    return _turned(q, table), _turned(k, table)


def _turned(x: mx.array, table: Rotary) -> mx.array:
    turned: Any = mx.custom_function(lambda x: _launch(x, table, 1))

    @turned.vjp
    def pull_back(primal: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        return _launch(cotangent, table, -1)

    return turned(x)


def _launch(x: mx.array, table: Rotary, sign: int) -> mx.array:
    B, T, H, D = x.shape
    given = table.positions
    positions = mx.zeros((1,), mx.int32) if given is None else given.astype(mx.int32)
    sizes = mx.array([B * T, T, H, D, sign], mx.int32)
    (y,) = ROTATE.launch(
        [x, table.cos, table.sin, positions, sizes],
        [(x.shape, x.dtype)],
        template=[("T", x.dtype), ("ROWS", 0 if given is None else given.ndim)],
        threadgroups=(
            B * T,
            -(-(H * D // 2) // THREADS),
            1,
        ),  # CUDA has 65,535 along the second axis
        threads=THREADS,
    )
    return y
