"""The array functions in NumPy. Every floating dtype is float64 here, whatever it is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minillm_core.ops.arrays import Axis, Known

__all__ = ["NumPyArrays"]

Array = NDArray[Any]


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(np.float64 if "float" in name else name)


class NumPyArrays(Known):
    """The functions of :class:`minillm_core.ops.arrays.ArrayFunctions`, for numpy.ndarray."""

    matmul_dtype = "float64"

    exp = staticmethod(np.exp)
    log = staticmethod(np.log)
    sqrt = staticmethod(np.sqrt)
    square = staticmethod(np.square)
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
