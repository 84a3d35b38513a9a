"""Every op in NumPy float64, forward only: the reference of all kernels, and the ops of the oracle.

Written for readability: no chunking, no fusion, no memory optimisation. The array functions follow the
ops; every floating dtype is float64 there, whatever its name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minillm_core import LossForm, Rotary
from minillm_core.inspection import OpsBase, visible_keys

Array = NDArray[Any]
Axis = int | tuple[int, ...] | None
PLAIN = LossForm()


def reference_op(name: str) -> Callable[..., Array]:
    """Return an op's reference: NumPy in float64, forward only.

    Args:
        name: a key of ``CONTRACTS``.

    Raises:
        AttributeError: there is no such op.
    """
    return getattr(sys.modules[__name__], name)


def linear(x: Array, weight: Array) -> Array:
    """Compute x weight^T."""
    return _float64(x) @ _float64(weight).T


def embedding(ids: Array, weight: Array) -> Array:
    """Look up weight[ids]."""
    return _float64(weight)[ids]


def rms_norm(x: Array, weight: Array | None, eps: float) -> Array:
    """Compute x / rms(x), times the weight."""
    x = _float64(x)
    normed = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return normed if weight is None else normed * _float64(weight)


def rotate(q: Array, k: Array, table: Rotary) -> tuple[Array, Array]:
    """Rotate each pair (x[i], x[i + D/2]) by its position's angle."""
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
    """Return which key each query sees, bool (T, S), or (B, 1, T, S) with documents (B, S)."""
    i = np.arange(keys - queries, keys)[:, None]  # the queries are the last T positions
    return visible_keys(i - np.arange(keys), window, documents)


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    window: float | None = None,
    documents: Array | None = None,
) -> Array:
    """Compute softmax(scale q k^T) v over the keys that each query sees."""
    group = q.shape[2] // k.shape[2]  # query heads that share a key-value head
    k, v = (np.repeat(_float64(x), group, axis=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * np.einsum("bthd,bshd->bhts", _float64(q), k)
    scores = np.where(visible(q.shape[1], k.shape[1], window, documents), scores, -np.inf)
    p = np.exp(scores - NumPyArrays.logsumexp(scores, -1, keepdims=True))
    return np.einsum("bhts,bshd->bthd", p, v)


def logits(hidden: Array, weight: Array, form: LossForm) -> Array:
    """Compute the head's logits, for the next token."""
    return form.logits(NumPyArrays, linear(hidden, weight))


def swiglu(gate: Array, up: Array) -> Array:
    """Compute silu(gate) * up."""
    return NumPyArrays.silu(_float64(gate)) * _float64(up)


def gram(x: Array, alpha: float = 1.0, beta: float = 0.0, gamma: float = 0.0) -> Array:
    """Compute alpha x x^T + beta x + gamma I."""
    made = alpha * (_float64(x) @ np.swapaxes(_float64(x), -1, -2)) + gamma * np.eye(x.shape[-2])
    return made + beta * _float64(x) if beta else made


def linear_cross_entropy(
    hidden: Array,
    weight: Array,
    targets: Array,
    weights: Array | None = None,
    form: LossForm = PLAIN,
) -> tuple[Array, Array, Array]:
    """Return (total, sums (K,), count): see the contract."""
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


def token_losses(hidden: Array, weight: Array, targets: Array, form: LossForm = PLAIN) -> Array:
    """Return each position's loss, (N,): a sum over one position."""
    rows = zip(_float64(hidden)[:, None], targets[:, None, None], strict=True)
    found = [linear_cross_entropy(h, weight, t, None, form)[0] for h, t in rows]
    return np.array(found, np.float64)


def _float64(x: Array) -> Array:
    return np.asarray(x, dtype=np.float64)


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(np.float64 if "float" in name else name)


class NumPyArrays(OpsBase):
    """The array functions that model code may use, for numpy.ndarray."""

    matmul_dtype = "float64"

    exp = staticmethod(np.exp)
    log = staticmethod(np.log)
    sqrt = staticmethod(np.sqrt)
    square = staticmethod(np.square)
    abs = staticmethod(np.abs)
    sign = staticmethod(np.sign)
    round = staticmethod(np.round)
    sin = staticmethod(np.sin)
    cos = staticmethod(np.cos)
    clip = staticmethod(np.clip)
    tril = staticmethod(np.tril)
    cumsum = staticmethod(np.cumsum)
    tanh = staticmethod(np.tanh)
    maximum = staticmethod(np.maximum)
    minimum = staticmethod(np.minimum)
    where = staticmethod(np.where)
    reshape = staticmethod(np.reshape)
    permute_dims = staticmethod(np.transpose)
    expand_dims = staticmethod(np.expand_dims)
    broadcast_to = staticmethod(np.broadcast_to)
    take = staticmethod(np.take)
    take_along_axis = staticmethod(np.take_along_axis)
    concat = staticmethod(np.concatenate)
    stack = staticmethod(np.stack)
    zeros_like = staticmethod(np.zeros_like)
    ones_like = staticmethod(np.ones_like)
    full_like = staticmethod(np.full_like)

    @staticmethod
    def like(number: Any, x: Array) -> Any:
        return number

    @staticmethod
    def constant(numbers: Sequence[float], shape: Sequence[int]) -> Array:
        return np.asarray(numbers, np.float64).reshape(shape)

    @staticmethod
    def scalar(number: Any) -> Array:
        return np.asarray(number, np.float64).reshape(())

    @staticmethod
    def sigmoid(x: Array) -> Array:
        return 0.5 * (1.0 + np.tanh(0.5 * x))  # does not overflow

    @staticmethod
    def take_rows(x: Array, indices: Array) -> Array:
        return np.take(x, indices, 0)

    @staticmethod
    def argsort(x: Array, axis: int = -1) -> Array:
        return np.argsort(x, axis).astype(np.int32)

    @staticmethod
    def silu(x: Array) -> Array:
        return x * NumPyArrays.sigmoid(x)

    @staticmethod
    def relu(x: Array) -> Array:
        return np.maximum(x, 0)

    @staticmethod
    def matrix_transpose(x: Array) -> Array:
        return np.swapaxes(x, -1, -2)

    @staticmethod
    def qr(x: Array) -> tuple[Array, Array]:
        return tuple(np.linalg.qr(x))

    @staticmethod
    def split(x: Array, parts: int | Sequence[int], axis: int = -1) -> Sequence[Array]:
        return np.split(x, parts if isinstance(parts, int) else np.cumsum(parts)[:-1], axis)

    @staticmethod
    def zeros(shape: Sequence[int], dtype: str = "float32") -> Array:
        return np.zeros(shape, _dtype(dtype))

    @staticmethod
    def ones(shape: Sequence[int], dtype: str = "float32") -> Array:
        return np.ones(shape, _dtype(dtype))

    @staticmethod
    def arange(n: int, dtype: str = "int32") -> Array:
        return np.arange(n, dtype=_dtype(dtype))

    @staticmethod
    def astype(x: Array, dtype: str) -> Array:
        return np.asarray(x).astype(_dtype(dtype))

    @staticmethod
    def astype_like(x: Array, y: Array) -> Array:
        return np.asarray(x).astype(y.dtype)

    @staticmethod
    def sum(x: Array, axis: Axis = None, keepdims: bool = False) -> Array:
        return np.sum(x, axis, keepdims=keepdims)

    @staticmethod
    def mean(x: Array, axis: Axis = None, keepdims: bool = False) -> Array:
        return np.mean(x, axis, keepdims=keepdims)

    @staticmethod
    def max(x: Array, axis: Axis = None, keepdims: bool = False) -> Array:
        return np.max(x, axis, keepdims=keepdims)

    @staticmethod
    def logsumexp(x: Array, axis: int = -1, keepdims: bool = False) -> Array:
        top = np.max(x, axis, keepdims=True)
        lse = top + np.log(np.sum(np.exp(x - top), axis, keepdims=True))
        return lse if keepdims else np.squeeze(lse, axis)

    @staticmethod
    def stop_gradient(x: Array) -> Array:
        return x
