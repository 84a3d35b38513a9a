# pyright: reportUndefinedVariable=false
# ruff: noqa: F821
"""Parts of modeling files that are the same for both frameworks.

Never imported: it is read as text before parts_torch.py or parts_mlx.py, which define the names that it
lacks (``Module``, ``Buffer``).
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

EVERYTHING = sys.maxsize  # the lookback of a part that needs every earlier column


class Param:
    """A trainable array, as a module declares it."""

    def __init__(self, shape):
        self.shape = tuple(shape)


class State:
    """A non-trainable array, which training updated without a gradient."""

    def __init__(self, shape):
        self.shape = tuple(shape)


class Linear(nn.Linear):
    """x (..., C) -> x weight^T (..., O)."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features, bias=False)


class ReplacedLinear(Module):
    """A linear layer whose product another part computes: ``product(x, weight, *more)``."""

    def __init__(self, in_features, out_features, product):
        super().__init__()
        self.weight = Param((out_features, in_features))
        self.product = product

    def forward(self, x, *more):
        return self.product(x, self.weight, *more)


class RMSNorm(Module):
    """RMSNorm (arXiv:1910.07467): x (..., C) -> x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, geometry):
        super().__init__()
        self.eps = geometry.norm_eps
        self.weight = Param((geometry.dim,))

    def forward(self, x):
        return self.ops.rms_norm(x, self.weight, self.eps)


class SwiGLU(Module):
    """SwiGLU (arXiv:2002.05202): x (B, T, C) -> down(silu(gate(x)) * up(x))."""

    def __init__(self, geometry):
        super().__init__()
        self.gate = Linear(geometry.dim, geometry.hidden)
        self.up = Linear(geometry.dim, geometry.hidden)
        self.down = Linear(geometry.hidden, geometry.dim)

    def forward(self, x):
        return self.down(self.ops.swiglu(self.gate(x), self.up(x)))


class Learned(Module):
    """A learned coefficient of a residual site, (1,)."""

    def __init__(self):
        super().__init__()
        self.scalar = Param((1,))

    def forward(self):
        return self.scalar


class Site(Module):
    """A weighted sum of sources: modules that compute sources, and coefficients by source."""

    def __init__(self, computed=None, /, **coefficients):
        super().__init__()
        self.computed = computed or {}
        self.coefficients = coefficients

    def forward(self, source, *arguments):
        return self.coefficients[source](*arguments)


class Rotary(NamedTuple):
    """Rotary angles: cos and sin of position times frequency."""

    cos: Any  # float32 (P, D/2)
    sin: Any
    frequencies: Any  # float32 (D/2,)
    positions: Any = None  # int32 (T,) or (B, T)


class Rope(Module):
    """Rotary position embedding (arXiv:2104.09864): tables of cos and sin; angles in float64."""

    def __init__(self, theta, length):
        super().__init__()
        shape = (length, len(theta))
        angles = np.outer(np.arange(length), theta)  # (P, D/2)
        self.cos = Buffer(shape, lambda: np.cos(angles).astype(np.float32))
        self.sin = Buffer(shape, lambda: np.sin(angles).astype(np.float32))
        self.frequencies = Buffer((len(theta),), lambda: np.asarray(theta, np.float32))

    def forward(self, positions):
        return Rotary(self.cos, self.sin, self.frequencies, positions)


def llama_frequencies(head_dim, base):
    """Return base^(-2i/D), radians per position, float64 (D/2,)."""
    return base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


class Call(NamedTuple):
    """The arguments of attention; a layout maps one call to another."""

    q: Any  # (B, T, H, D)
    k: Any  # (B, T, K, D)
    v: Any  # (B, T, K, D)
    positions: Any = None
    window: Any = None
    documents: Any = None
    scale: Any = None


class Layout(Module):
    """A rearrangement of heads and positions around attention."""

    rope = "before"
    stretch = 1


def look_back(node, cache, name, *given, shape, emits=False):
    """Run a part that also reads earlier columns; return its result for the given columns.

    ``shape``: (B, T); arrays with this leading shape are columns.
    """
    if cache is None or not node.lookback:
        result = node(*given)
        return result[0] if emits else result
    moves = [tuple(getattr(one, "shape", ()))[:2] == tuple(shape) for one in given]
    columns = [one for one, moving in zip(given, moves, strict=True) if moving]
    together = iter(cache.extend(name, columns, node.lookback))
    result = node(
        *(next(together) if moving else one for one, moving in zip(given, moves, strict=True))
    )
    result = result[0] if emits else result
    if isinstance(result, (tuple, list)):
        return tuple(y[:, -shape[1] :] for y in result)
    return result[:, -shape[1] :] if result.ndim > 1 else result[-shape[1] :]


def random_stream(name: str = "") -> np.random.Generator:
    """Raise: inference draws no random numbers."""
    raise RuntimeError("random numbers are drawn in training alone")


class PlanError(ValueError):
    """The error of a part that does not support the model's sizes."""

    def __init__(self, what, *, where=None, fix=None):
        super().__init__(what)


def keeping(node, cache, name, given, *, kept, states=()):
    """Run a part that keeps arrays of all columns, passed at the places ``kept`` of its arguments.

    ``states``: indices into ``kept`` of recurrent states, of which only the last is kept.
    """
    given, earlier = list(given), None if cache is None else cache.at(name)
    for index, place in enumerate(kept):
        given[place] = None if earlier is None else earlier[index]
    result, *new = node(*given)
    if cache is not None:
        appended = [None if index in states else new[index] for index in range(len(kept))]
        cache.extend(name, appended)
        for index in states:
            cache.at(name)[index] = new[index]
    return result


class Turn:
    """The cache of one turn of layers that run several times, under names of its own."""

    def __init__(self, cache, number):
        self.cache, self.end = cache, f"@{number}"

    def at(self, name):
        return self.cache.at(name + self.end)

    def extend(self, name, arrays, keep=EVERYTHING):
        return self.cache.extend(name + self.end, arrays, keep)


def visible(ops, queries, keys, window, documents):
    """Return which keys each query sees, bool (T, S) or (B, 1, T, S), and their distance, int32 (T, S).

    The queries are the last T of the S positions.
    """
    at = ops.arange(keys)
    distance = ops.expand_dims(at[keys - queries :], 1) - at
    mask = distance >= 0
    if window is not None:
        mask = mask & (distance < window)
    if documents is not None:
        mask = mask & (documents[:, None, keys - queries :, None] == documents[:, None, None, :])
    return mask, distance
