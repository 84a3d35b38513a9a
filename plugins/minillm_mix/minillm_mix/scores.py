"""The two products of attention, composed, for variants that no fused kernel computes.

Both store (B, H, T, S) numbers, unlike a fused kernel.
"""

from __future__ import annotations

from typing import Any

HIDDEN = -1e30
"""The score of a key that a query does not see: finite, so that no gradient is NaN."""


def scores(ops: Any, q: Any, k: Any, scale: float) -> Any:
    """Compute scale q k^T: q (B, T, H, D), k (B, S, K, D) -> float32 (B, H, T, S); h reads k[h // (H / K)]."""
    (B, T, H, D), (S, K) = q.shape, k.shape[1:3]
    q = ops.reshape(ops.permute_dims(q * scale, (0, 2, 1, 3)), (B, K, H // K * T, D))
    product = q @ ops.permute_dims(k, (0, 2, 3, 1))  # (B, K, H / K T, S)
    return ops.astype(ops.reshape(product, (B, H, T, S)), "float32")


def summed(ops: Any, weights: Any, v: Any) -> Any:
    """Multiply weights (B, H, T, S) with v (B, S, K, D) -> (B, T, H, D), in v's dtype."""
    (B, H, T, S), (K, D) = weights.shape, v.shape[2:]
    weights = ops.reshape(weights, (B, K, H // K * T, S))
    y = ops.astype(weights, dtype_of(v)) @ ops.permute_dims(v, (0, 2, 1, 3))
    return ops.permute_dims(ops.reshape(y, (B, H, T, D)), (0, 2, 1, 3))


def dtype_of(x: Any) -> str:
    """Return an array's dtype by its name: "bfloat16", on every framework."""
    return str(x.dtype).rpartition(".")[2]
