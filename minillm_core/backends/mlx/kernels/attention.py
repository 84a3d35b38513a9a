"""Attention on MLX: the fast op, and the composed form it is compared with."""

from __future__ import annotations

import mlx.core as mx

__all__ = ["composed", "sdpa"]


def sdpa(
    q: mx.array,  # (B, T, H, D)
    k: mx.array,  # (B, S, K, D)
    v: mx.array,  # (B, S, K, D)
    *,
    scale: float | None = None,
    window: int | mx.array | None = None,
    documents: mx.array | None = None,
) -> mx.array:
    """mx.fast.scaled_dot_product_attention: fused forward and backward where plainly causal.

    4 B T S H D FLOPs; with a window or documents MLX 0.32 leaves its fused backward pass and
    holds B H T S scores.
    """
    queries, keys = q.shape[1], k.shape[1]
    window = None if isinstance(window, int) and window >= keys else window
    mask: str | mx.array = "causal"  # lower-right
    if window is not None or documents is not None:
        mask = _visible(queries, keys, window, documents)
    y = mx.fast.scaled_dot_product_attention(
        q.swapaxes(1, 2),
        k.swapaxes(1, 2),
        v.swapaxes(1, 2),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        mask=mask,
    )
    return y.swapaxes(1, 2)


def composed(
    q: mx.array,  # (B, T, H, D)
    k: mx.array,  # (B, S, K, D)
    v: mx.array,  # (B, S, K, D)
    *,
    scale: float | None = None,
    window: int | mx.array | None = None,
    documents: mx.array | None = None,
) -> mx.array:
    """The formula: scores, mask, softmax in float32, product; 6 B H T S bytes and up."""
    queries, keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (mx.repeat(x, group, axis=2).swapaxes(1, 2) for x in (k, v))  # (B, H, S, D)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q.swapaxes(1, 2) * factor) @ k.swapaxes(-1, -2)  # (B, H, T, S)
    mask = _visible(queries, keys, window, documents)
    p = mx.softmax(mx.where(mask, scores.astype(mx.float32), -mx.inf), axis=-1)
    return (p.astype(v.dtype) @ v).swapaxes(1, 2)


def _visible(
    queries: int, keys: int, window: int | mx.array | None, documents: mx.array | None
) -> mx.array:
    """bool (T, S), or (B, 1, T, S) with documents (B, S); the queries are the last T positions."""
    distance = mx.arange(keys - queries, keys)[:, None] - mx.arange(keys)
    mask = distance >= 0
    if window is not None:
        mask = mask & (distance < window)
    if documents is not None:
        own = documents[:, None, keys - queries :, None] == documents[:, None, None, :]
        mask = mask & own
    return mask
