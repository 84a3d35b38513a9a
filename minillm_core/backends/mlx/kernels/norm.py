"""RMSNorm on MLX: the fast op, and the composed form it is compared with."""

from __future__ import annotations

import mlx.core as mx

__all__ = ["composed", "fused"]


def fused(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """mx.fast.rms_norm, float32 inside: reads and writes x (..., C) once."""
    weight = None if weight is None else weight.astype(x.dtype)  # else the result is promoted
    return mx.fast.rms_norm(x, weight, eps)


def composed(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """The formula in float32."""
    wide = x.astype(mx.float32)
    normed = wide * mx.rsqrt(mx.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (normed if weight is None else normed * weight).astype(x.dtype)
