"""Every op in NumPy float64, forward only: the oracle of all kernels and the numpy backend's ops.

Written for reading: no chunks, no fused forms, no care for memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from minillm_core.ops.contract import Rotary
from minillm_core.ops.form import LossForm
from minillm_core.ops.reference_arrays import NumPyArrays

__all__ = [
    "attention",
    "embedding",
    "linear",
    "linear_cross_entropy",
    "logits",
    "rms_norm",
    "rotate",
    "swiglu",
    "visible",
]

Array = NDArray[Any]
PLAIN = LossForm()


def linear(x: Array, weight: Array) -> Array:
    """X weight^T."""
    return _float64(x) @ _float64(weight).T


def embedding(ids: Array, weight: Array) -> Array:
    """weight[ids]."""
    return _float64(weight)[ids]


def rms_norm(x: Array, weight: Array | None, eps: float) -> Array:
    """X / rms(x), times the weight."""
    x = _float64(x)
    normed = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return normed if weight is None else normed * _float64(weight)


def rotate(q: Array, k: Array, table: Rotary) -> tuple[Array, Array]:
    """Each pair (x[i], x[i + D/2]) turned by its position's angle."""
    rows = np.arange(q.shape[1]) if table.positions is None else table.positions
    cos = _float64(table.cos)[rows][..., None, :]  # (T, 1, D/2) or (B, T, 1, D/2)
    sin = _float64(table.sin)[rows][..., None, :]

    def turned(x: Array) -> Array:
        a, b = np.split(_float64(x), 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    return turned(q), turned(k)


def visible(
    queries: int, keys: int, window: float | None = None, documents: Array | None = None
) -> Array:
    """Which key each query sees: bool (T, S), or (B, T, S) with documents (B, S)."""
    i = np.arange(keys - queries, keys)[:, None]  # the queries are the last T positions
    distance = i - np.arange(keys)
    mask = distance >= 0
    if window is not None:
        mask = mask & (distance < window)
    if documents is not None:
        mask = mask & (documents[:, keys - queries :, None] == documents[:, None, :])
    return mask


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    window: float | None = None,
    documents: Array | None = None,
) -> Array:
    """softmax(scale q k^T) v over the keys that each query sees."""
    group = q.shape[2] // k.shape[2]  # query heads that share a key-value head
    k, v = (np.repeat(_float64(x), group, axis=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * np.einsum("bthd,bshd->bhts", _float64(q), k)
    mask = visible(q.shape[1], k.shape[1], window, documents)
    mask = mask if documents is None else mask[:, None]  # (T, S) or (B, 1, T, S)
    scores = np.where(mask, scores, -np.inf)
    p = np.exp(scores - NumPyArrays.logsumexp(scores, -1, keepdims=True))
    return np.einsum("bhts,bshd->bthd", p, v)


def logits(hidden: Array, weight: Array, form: LossForm) -> Array:
    """The head's logits where they are wanted themselves."""
    return form.logits(NumPyArrays, linear(hidden, weight))


def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) * up."""
    return NumPyArrays.silu(_float64(gate)) * _float64(up)


def linear_cross_entropy(
    hidden: Array,
    weight: Array,
    targets: Array,
    weights: Array | None = None,
    form: LossForm = PLAIN,
) -> tuple[Array, Array, Array]:
    """(total, sums (K,), count): see the contract."""
    z = logits(hidden, weight, form)  # (N, V)
    lse = NumPyArrays.logsumexp(z)  # (N,)
    log_p = z - lse[:, None]
    supervised = targets >= 0  # (K, N)
    picked = np.take_along_axis(log_p, np.where(supervised, targets, 0).T, axis=1).T  # (K, N)
    loss = np.where(supervised, form.loss(picked, np.mean(log_p, axis=-1), lse), 0.0)  # (K, N)
    if weights is None:
        weights = np.ones(len(targets))
    weights = _float64(weights)
    weighted = loss * (weights if weights.ndim == 2 else weights[:, None])
    sums, count = np.sum(loss, axis=-1), np.sum(supervised[0])
    return np.asarray(np.sum(weighted)), sums, np.asarray(count, np.float64)


def _float64(x: Array) -> Array:
    return np.asarray(x, dtype=np.float64)
