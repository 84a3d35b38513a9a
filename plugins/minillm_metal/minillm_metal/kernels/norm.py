"""RMSNorm's backward pass in one kernel, which also sums the weight's gradient over rows.

MLX's writes the weight's gradient of every row, and sums those in a second kernel: 10 bytes a feature in
bfloat16, of which 4 are for this sum. Here a threadgroup sums its rows in registers.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from minillm_metal.kernel import Kernel

__all__ = ["NORM_GRADIENT", "rms_norm"]

NORM_GRADIENT = Kernel(
    "norm_gradient",
    inputs=("x", "g", "w", "sizes", "numbers"),
    outputs=("dx", "parts"),
    headers=("reduce",),
)
GROUPS = 1024  # threadgroups, and sums of rows, at most
FEATURES = 4  # a lane, until a threadgroup has all its lanes
LANES = 1024


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """Normalise x (..., C) by mx.fast.rms_norm, float32 inside; weight (C,)."""
    if weight is None:
        return mx.fast.rms_norm(x, None, eps)
    normed: Any = mx.custom_function(lambda x, weight: mx.fast.rms_norm(x, weight, eps))

    @normed.vjp
    def pull_back(
        primals: tuple[mx.array, mx.array], cotangent: mx.array, output: mx.array
    ) -> tuple[mx.array, mx.array]:
        return gradients(*primals, cotangent, eps)

    return normed(x, weight.astype(x.dtype))  # else the result is promoted


def gradients(
    x: mx.array, weight: mx.array, upstream: mx.array, eps: float
) -> tuple[mx.array, mx.array]:
    """Return the gradients of x (..., C) and weight (C,)."""
    features = x.shape[-1]
    rows = x.size // features
    groups = min(rows, GROUPS)
    threads = min(LANES, -(-features // (32 * FEATURES)) * 32)
    sizes = mx.array([rows, features, groups], mx.int32)
    dx, parts = NORM_GRADIENT.launch(
        [x, upstream, weight, sizes, mx.array([eps], mx.float32)],
        [(x.shape, x.dtype), ((groups, features), mx.float32)],
        template=[("T", x.dtype), ("EACH", -(-features // threads))],
        threadgroups=(groups, 1, 1),
        threads=threads,
    )
    return dx, parts.sum(0).astype(weight.dtype)
