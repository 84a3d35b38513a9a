"""The ops on MLX: the ops object, with the array functions and the chosen kernels; and the usual kernels.

The loss is in loss.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from minillm_core.backends.mlx import loss
from minillm_core.backends.mlx.arrays import MLXArrays
from minillm_core.ops.arrays import visible
from minillm_core.ops.contract import Rotary
from minillm_core.ops.form import LossForm


class MLXOps(MLXArrays):
    """The object that model code calls ``self.ops``, on MLX.

    Args:
        kernels: op -> function, from :func:`minillm_core.ops.load`; ops of plugins included. An
            op that is missing gets the core's usual kernel.
    """

    name = "mlx"

    def __init__(self, kernels: Mapping[str, Callable[..., Any]] | None = None) -> None:
        plain = (linear, embedding, rotate, swiglu, logits, gram, loss.token_losses)
        usual = {kernel.__name__: kernel for kernel in plain}
        usual |= {"rms_norm": rms_norm_fused, "attention": sdpa, "linear_cross_entropy": loss.dense}
        vars(self).update(usual | dict(kernels or {}))


def linear(x: mx.array, weight: mx.array) -> mx.array:
    """Compute x weight^T: x (..., C), weight (O, C) -> (..., O)."""
    return x @ weight.T


def embedding(ids: mx.array, weight: mx.array) -> mx.array:
    """Look up weight[ids]: ids int32 (...), weight (V, C) -> (..., C). Ids are not range-checked."""
    return weight[ids]


def logits(hidden: mx.array, weight: mx.array, form: LossForm) -> mx.array:
    """Compute the head's logits, for the next token: (B, C), (V, C) -> float32 (B, V)."""
    return form.logits(mx, (hidden @ weight.T).astype(mx.float32))


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """Compute silu(gate) * up."""
    return MLXArrays.silu(gate) * up


def gram(x: mx.array, alpha: float = 1.0, beta: float = 0.0, gamma: float = 0.0) -> mx.array:
    """Compute alpha x x^T + beta x + gamma I: (N, R, C) -> (N, R, R)."""
    x = mx.stop_gradient(x)
    made = alpha * (x @ x.swapaxes(-1, -2)) + (beta * x if beta else 0.0)
    return made + gamma * mx.eye(x.shape[-2], dtype=x.dtype) if gamma else made


def rms_norm_fused(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """Call mx.fast.rms_norm, float32 inside: reads and writes x (..., C) once."""
    weight = None if weight is None else weight.astype(x.dtype)  # else the result is promoted
    return mx.fast.rms_norm(x, weight, eps)


def rms_norm_composed(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """Compute RMSNorm from array functions, in float32."""
    wide = x.astype(mx.float32)
    normed = wide * mx.rsqrt(mx.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (normed if weight is None else normed * weight).astype(x.dtype)


def rotate(q: mx.array, k: mx.array, table: Rotary) -> tuple[mx.array, mx.array]:
    """Rotate q (B, T, H, D) and k (B, T, K, D) by the table's angles, in float32."""
    if table.positions is None:
        cos, sin = table.cos[: q.shape[1]], table.sin[: q.shape[1]]
    else:
        cos, sin = table.cos[table.positions], table.sin[table.positions]
    cos, sin = mx.expand_dims(cos, -2), mx.expand_dims(sin, -2)  # (T, 1, D/2), (B, T, 1, D/2)
    return _turned(q, cos, sin), _turned(k, cos, sin)


def rotate_fast(q: mx.array, k: mx.array, table: Rotary) -> tuple[mx.array, mx.array]:
    """Call mx.fast.rope for positions 0 .. T-1; use the table if positions are given (decoding).

    Reads and writes q and k once. Its angles are float32 products, with a relative error of 6e-8:
    2e-6 of a value after 64 positions, 3e-5 after 1,024.
    """
    if table.positions is not None:
        return rotate(q, k, table)
    wavelengths = 1.0 / table.frequencies  # mx.fast.rope takes these; frequency 0 rotates nothing
    return _roped(q, wavelengths), _roped(k, wavelengths)


def _turned(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    a, b = mx.split(x, 2, axis=-1)  # float32 from here by promotion with the table
    return mx.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _roped(x: mx.array, wavelengths: mx.array) -> mx.array:
    y = mx.fast.rope(
        x.swapaxes(1, 2),  # (B, H, T, D)
        x.shape[-1],
        traditional=False,
        base=None,
        scale=1.0,
        offset=0,
        freqs=wavelengths,
    )
    return y.swapaxes(1, 2)


def sdpa(
    q: mx.array,  # (B, T, H, D)
    k: mx.array,  # (B, S, K, D)
    v: mx.array,  # (B, S, K, D)
    *,
    scale: float | None = None,
    window: int | mx.array | None = None,
    documents: mx.array | None = None,
) -> mx.array:
    """Call mx.fast.scaled_dot_product_attention: fused forward and backward for plain causal attention.

    4 B T S H D FLOPs; with a window or documents MLX 0.32 does not use its fused backward pass and
    holds B H T S scores.
    """
    queries, keys = q.shape[1], k.shape[1]
    window = None if isinstance(window, int) and window >= keys else window
    mask: str | mx.array = "causal"  # aligned lower-right
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


def attention_composed(
    q: mx.array,  # (B, T, H, D)
    k: mx.array,  # (B, S, K, D)
    v: mx.array,  # (B, S, K, D)
    *,
    scale: float | None = None,
    window: int | mx.array | None = None,
    documents: mx.array | None = None,
) -> mx.array:
    """Compute attention from array functions, softmax in float32; 6 B H T S bytes and up."""
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
    return visible(mx.arange(keys - queries, keys)[:, None] - mx.arange(keys), window, documents)
