"""The kernels' results and gradients in NumPy float64, and the comparison of a kernel with them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from minillm_core import LossForm, Rotary, SigmoidCap, TanhCap
from minillm_core.inspection import CONTRACTS

Array = np.ndarray
NAMES = {mx.float32: "float32", mx.bfloat16: "bfloat16", mx.float16: "float16"}


def rounded(rng: np.random.Generator, dtype: mx.Dtype, *shape: int) -> tuple[mx.array, Array]:
    """Draw normal numbers in a dtype, and return the same in float64."""
    x = mx.array(rng.standard_normal(shape, np.float32)).astype(dtype)
    return x, wide(x)


def wide(x: mx.array) -> Array:
    """Convert an array to float64."""
    return np.array(x.astype(mx.float32), np.float64)


def close(op: str, dtype: mx.Dtype, got: mx.array, want: Array) -> None:
    """Assert that results are within the tolerance of the op's contract."""
    limit = CONTRACTS[op].tolerance[NAMES[dtype]]
    assert got.shape == want.shape
    error = np.linalg.norm(wide(got) - want) / max(np.linalg.norm(want), want.size**0.5, 1.0)
    assert error <= limit, f"{error:.1e} is above {limit:.0e}"


def cap_and_slope(form: LossForm, x: Array) -> tuple[Array, Array]:
    """Return the logits of a product, and their derivative with respect to it."""
    x = x * form.scale
    match form.cap:
        case TanhCap(cap):
            return cap * np.tanh(x / cap), form.scale / np.cosh(x / cap) ** 2
        case SigmoidCap(a, b, c):
            s = 1 / (1 + np.exp(-(x + b) / c))
            return a * s, form.scale * a * s * (1 - s) / c
    return x, np.full_like(x, form.scale)


def loss_rows(
    product: Array, targets: Array, weights: Array, form: LossForm
) -> tuple[Array, Array]:
    """Compute losses (K, n), and their weighted sum's gradient (n, V)."""
    z, slope = cap_and_slope(form, product)
    top = z.max(1, keepdims=True)
    lse = top[:, 0] + np.log(np.exp(z - top).sum(1))
    log_p, d = z - lse[:, None], np.zeros_like(z)
    losses = np.zeros(targets.shape)
    for k, n in zip(*np.nonzero(targets >= 0), strict=True):
        target, w = targets[k, n], weights[k, n]
        losses[k, n] = -(1 - form.smoothing) * log_p[n, target] + form.z * lse[n] ** 2
        losses[k, n] -= form.smoothing * log_p[n].mean()
        p = np.exp(log_p[n])
        d[n] += w * (p * (1 + 2 * form.z * lse[n]) - form.smoothing / len(p))
        d[n, target] -= w * (1 - form.smoothing)
    return losses, d * slope


def attention(
    q: Array, k: Array, v: Array, dy: Array, window: int | None, documents: Array | None
) -> tuple[Array, Array, Array, Array]:
    """Compute y, dq, dk and dv."""
    (_, T, H, D), (S, K) = q.shape, k.shape[1:3]
    k, v = (np.repeat(x, H // K, axis=2) for x in (k, v))
    behind = np.arange(S - T, S)[:, None] - np.arange(S)
    seen = ((behind >= 0) & (behind < (window or S)))[None, None]
    if documents is not None:
        seen = seen & (documents[:, None, S - T :, None] == documents[:, None, None, :])
    s = np.where(seen, np.einsum("bthd,bshd->bhts", q, k) / D**0.5, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    y = np.einsum("bhts,bshd->bthd", p, v)
    dp = np.einsum("bthd,bshd->bhts", dy, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / D**0.5

    def shared(x: Array) -> Array:
        return x.reshape(*x.shape[:2], K, H // K, D).sum(3)

    dq = np.einsum("bhts,bshd->bthd", ds, k)
    dk = np.einsum("bhts,bthd->bshd", ds, q)
    dv = np.einsum("bhts,bthd->bshd", p, dy)
    return y, dq, shared(dk), shared(dv)


def rotate(x: Array, table: Rotary) -> Array:
    """Rotate x (B, T, H, D)."""
    rows = np.arange(x.shape[1]) if table.positions is None else np.array(table.positions)
    cos, sin = (np.array(y, np.float64)[rows][..., None, :] for y in (table.cos, table.sin))
    a, b = np.split(x, 2, -1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def norm(x: Array, w: Array, dy: Array, eps: float) -> tuple[Array, Array, Array]:
    """Compute RMSNorm's y, dx and dw of x, dy (N, C), w (C,)."""
    r = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    along = (dy * w * x).mean(-1, keepdims=True) * r * r
    return x * r * w, r * (dy * w - x * along), (dy * x * r).sum(0)


def pulled(
    function: Any, arrays: list[mx.array], upstream: mx.array
) -> tuple[mx.array, list[mx.array]]:
    """Return a function's result, and its gradients for all arrays, for an upstream gradient."""
    outputs, gradients = mx.vjp(lambda *xs: function(*xs), arrays, [upstream])
    mx.eval(outputs, gradients)
    return outputs[0], gradients
