# pyright: reportUndefinedVariable=false
# ruff: noqa: F821
"""Parts of modeling files for mlx-lm, besides the model: whole definitions are copied from here.

Never imported: ``copying.py`` reads it as text after parts_both.py, and copies the parts that a model uses.
Names and arguments are those of ``minillm_core``, so that a plugin's modules work with either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import make_dataclass, replace
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

SIZES: dict[str, Any] = {}
GEOMETRY: Any = None
Decoder: Any = None
# placeholders: these three are generated for each model


class Ops:
    """The array functions that the parts of the model call."""

    exp = staticmethod(mx.exp)
    log = staticmethod(mx.log)
    sqrt = staticmethod(mx.sqrt)
    square = staticmethod(mx.square)
    abs = staticmethod(mx.abs)
    sign = staticmethod(mx.sign)
    round = staticmethod(mx.round)
    sin = staticmethod(mx.sin)
    cos = staticmethod(mx.cos)
    clip = staticmethod(mx.clip)
    tril = staticmethod(mx.tril)
    tanh = staticmethod(mx.tanh)
    sigmoid = staticmethod(mx.sigmoid)
    maximum = staticmethod(mx.maximum)
    minimum = staticmethod(mx.minimum)
    where = staticmethod(mx.where)
    take = staticmethod(mx.take)
    take_along_axis = staticmethod(mx.take_along_axis)
    expand_dims = staticmethod(mx.expand_dims)
    zeros_like = staticmethod(mx.zeros_like)
    ones_like = staticmethod(mx.ones_like)
    stop_gradient = staticmethod(mx.stop_gradient)
    from_numpy = staticmethod(mx.array)
    to_numpy = staticmethod(np.array)

    @staticmethod
    def linear(x, weight):
        return x @ weight.T

    @staticmethod
    def embedding(ids, weight):
        return weight[ids]

    @staticmethod
    def like(number, x):
        return number.astype(x.dtype) if isinstance(number, mx.array) else number

    @staticmethod
    def constant(numbers, shape):
        return mx.array([float(one) for one in numbers]).reshape(tuple(shape))

    @staticmethod
    def scalar(number):
        if isinstance(number, mx.array):
            return number.astype(mx.float32).reshape(())
        return mx.array(number, dtype=mx.float32)

    @staticmethod
    def take_rows(x, indices):
        return mx.take(x, indices, axis=0)

    @staticmethod
    def argsort(x, axis=-1):
        return mx.argsort(x, axis=axis).astype(mx.int32)

    @staticmethod
    def silu(x):
        return x * mx.sigmoid(x)

    @staticmethod
    def relu(x):
        return mx.maximum(x, 0)

    @staticmethod
    def reshape(x, shape):
        return x.reshape(tuple(shape))

    @staticmethod
    def permute_dims(x, axes):
        return x.transpose(tuple(axes))

    @staticmethod
    def matrix_transpose(x):
        return x.swapaxes(-1, -2)

    @staticmethod
    def concat(arrays, axis=0):
        return mx.concatenate(list(arrays), axis=axis)

    @staticmethod
    def stack(arrays, axis=0):
        return mx.stack(list(arrays), axis=axis)

    @staticmethod
    def split(x, parts, axis=-1):
        cuts = parts if isinstance(parts, int) else list(accumulate(parts))[:-1]
        return list(mx.split(x, cuts, axis=axis))

    @staticmethod
    def cumsum(x, axis):
        if not mx.issubdtype(x.dtype, mx.floating):
            return mx.cumsum(x, axis=axis)
        return mx.cumsum(x.astype(mx.float32), axis=axis).astype(x.dtype)

    @staticmethod
    def scan(step, carry, arrays):
        """Run ``carry, y = step(carry, slices)`` along axis 1; return the last carry and all y."""
        found = []
        for turn in range(arrays[0].shape[1]):
            carry, y = step(carry, tuple(x[:, turn] for x in arrays))
            found.append(y)
        return carry, mx.stack(found, axis=1)

    @staticmethod
    def broadcast_to(x, shape):
        return mx.broadcast_to(x, tuple(shape))

    @staticmethod
    def zeros(shape, dtype="float32"):
        return mx.zeros(tuple(shape), dtype_of(dtype))

    @staticmethod
    def ones(shape, dtype="float32"):
        return mx.ones(tuple(shape), dtype_of(dtype))

    @staticmethod
    def full_like(x, value):
        return mx.full(x.shape, value, x.dtype)

    @staticmethod
    def arange(n, dtype="int32"):
        return mx.arange(n, dtype=dtype_of(dtype))

    @staticmethod
    def astype(x, dtype):
        return x.astype(dtype_of(dtype))

    @staticmethod
    def astype_like(x, y):
        return x.astype(y.dtype)

    @staticmethod
    def sum(x, axis=None, keepdims=False):
        return mx.sum(x, axis=axis, keepdims=keepdims)

    @staticmethod
    def mean(x, axis=None, keepdims=False):
        return mx.mean(x, axis=axis, keepdims=keepdims)

    @staticmethod
    def max(x, axis=None, keepdims=False):
        return mx.max(x, axis=axis, keepdims=keepdims)

    @staticmethod
    def logsumexp(x, axis=-1, keepdims=False):
        return mx.logsumexp(x, axis=axis, keepdims=keepdims)

    @staticmethod
    def rms_norm(x, weight, eps):
        """x / sqrt(mean(x^2) + eps) * weight over the last axis, float32 inside."""
        weight = None if weight is None else weight.astype(x.dtype)
        return mx.fast.rms_norm(x, weight, eps)

    @staticmethod
    def swiglu(gate, up):
        return gate * mx.sigmoid(gate) * up

    @staticmethod
    def rotate(q, k, table):
        """Rotate each pair (a, b) = (x[i], x[i + D/2]) to [a cos - b sin, b cos + a sin]."""
        if table.positions is None:
            cos, sin = table.cos[: q.shape[1]], table.sin[: q.shape[1]]
        else:
            cos, sin = table.cos[table.positions], table.sin[table.positions]
        cos, sin = mx.expand_dims(cos, -2), mx.expand_dims(sin, -2)  # (T, 1, D/2), (B, T, 1, D/2)
        return turned(q, cos, sin), turned(k, cos, sin)

    @staticmethod
    def attention(q, k, v, *, scale=None, window=None, documents=None):
        """softmax(scale q k^T) v, causal: q (B, T, H, D), k and v (B, S, K, D) -> (B, T, H, D).

        The queries are the last T of the S positions; each sees ``window`` keys, itself included.
        """
        queries, keys = q.shape[1], k.shape[1]
        distance = mx.arange(keys - queries, keys)[:, None] - mx.arange(keys)
        mask = distance >= 0
        if window is not None:
            mask = mask & (distance < window)
        if documents is not None:
            own = documents[:, None, keys - queries :, None] == documents[:, None, None, :]
            mask = mask & own
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        q, k, v = q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2)
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
        return y.swapaxes(1, 2)


def dtype_of(name):
    """Return a dtype by its name."""
    return mx.bool_ if name == "bool" else getattr(mx, name)


def turned(x, cos, sin):
    """Rotate the pairs of x (B, T, H, D)."""
    a, b = mx.split(x, 2, axis=-1)
    return mx.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


# The sizes of the model, and the index of a layer. mlx-lm loads this file without an entry in
# sys.modules, which @dataclass needs.
Geometry = make_dataclass(
    "Geometry",
    [
        ("layers", int),
        ("dim", int),  # C
        ("heads", int),  # H
        ("kv_heads", int),  # K
        ("head_dim", int),  # D
        ("hidden", int),
        ("vocab", int),  # V
        ("positions", int),  # in the longest row
        ("norm_eps", float),
        ("layer", int, None),
    ],
    frozen=True,
)


class Buffer:
    """A constant float32 array, built by a function."""

    def __init__(self, shape, fn: Callable[[], np.ndarray]):
        self.fn = fn


class Module(nn.Module):
    """The base class of all parts: declared arrays become MLX's."""

    ops = Ops()
    lookback = 0

    def __setattr__(self, name, value):
        if isinstance(value, Param):
            value = mx.zeros(value.shape)
        elif isinstance(value, State):
            super().__setattr__(name, mx.zeros(value.shape))
            self.freeze(keys=[name], recurse=False)
            return
        elif isinstance(value, Buffer):
            object.__setattr__(self, name, mx.array(value.fn()))
            return
        elif isinstance(value, (list, tuple, dict)) and not isinstance(value, nn.Module):
            items = value.values() if isinstance(value, dict) else value
            if not any(isinstance(one, nn.Module) for one in items):
                object.__setattr__(self, name, value)  # else MLX would treat it as parameters
                return
        super().__setattr__(name, value)

    def __call__(self, *arguments):
        return self.forward(*arguments)


class Embedding(nn.Embedding):
    """ids (B, T) -> (B, T, C)."""


class Columns:
    """The KV cache: keys and values of earlier columns, and columns that other parts read again."""

    def __init__(self):
        self.columns = 0
        self.kept = {}

    def at(self, name):
        """Return the arrays kept under a name; None: nothing yet."""
        return self.kept.get(name)

    def extend(self, name, arrays, keep=EVERYTHING):
        """Append arrays (B, T, ...) to the columns kept under a name; return all, keep the last ``keep``."""
        earlier = self.kept.get(name, [None] * len(arrays))
        together = [
            new if old is None or new is None else mx.concatenate([old, new], axis=1)
            for old, new in zip(earlier, arrays, strict=True)
        ]
        self.kept[name] = [
            None if one is None else one[:, max(0, one.shape[1] - keep) :] for one in together
        ]
        return together

    @property
    def state(self):
        return [one for arrays in self.kept.values() for one in arrays if one is not None]

    @property
    def offset(self):
        return self.columns

    @property
    def nbytes(self):
        return sum(one.nbytes for one in self.state)

    def size(self):
        return self.columns

    def empty(self):
        return not self.columns

    def is_trimmable(self):
        return False  # parts read columns again that would be gone


class ModelArgs:
    """config.json: sizes, which must equal this file's, and the longest row."""

    def __init__(self, **config):
        for name, size in SIZES.items():
            if config.get(name, size) != size:
                raise ValueError(
                    f"config.json says {name}={config[name]!r}, and this file is of a model with "
                    f"{size!r}: export the model again"
                )
        longest = config.get("max_position_embeddings", GEOMETRY.positions)
        if type(longest) is not int or not 0 < longest <= 1 << 24:
            raise ValueError(
                f"max_position_embeddings={longest!r} in config.json is not a length of a row"
            )
        self.model_type = "minillm"
        self.max_position_embeddings = longest

    @classmethod
    def from_dict(cls, config):
        return cls(**config)


class Model(nn.Module):
    """The model for mlx-lm. Rows begin at position 0, without padding."""

    def __init__(self, args):
        super().__init__()
        self.args, self.model_type = args, args.model_type
        self.model = Decoder(replace(GEOMETRY, positions=args.max_position_embeddings))

    @property
    def layers(self):
        return self.model.layers

    def make_cache(self):
        return [Columns()]

    def __call__(self, inputs, cache=None):
        """Inputs (B, T) -> logits float32 (B, T, V)."""
        columns = None if cache is None else cache[0]
        if columns is not None and not isinstance(columns, Columns):
            raise ValueError(
                "this model keeps its columns in a cache of its own: model.make_cache()"
            )
        longest = self.args.max_position_embeddings
        length = inputs.shape[1] + (0 if columns is None else columns.columns)
        if length > longest:
            raise ValueError(
                f"a row of {length} tokens, but the model has {longest} positions: give fewer, or set "
                "max_position_embeddings in config.json"
            )
        return self.model.logits(self.model.hidden(inputs.astype(mx.int32), columns))
