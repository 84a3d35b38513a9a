"""The array functions on MLX."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx

from minillm_core.ops.arrays import Axis, Known, last_first

BLOCK = 4096  # how many elements MLX adds sequentially within float32's tolerance


class MLXArrays(Known, module=mx):
    """The functions of :class:`minillm_core.ops.arrays.ArrayFunctions`, for mlx.core.array.

    On a CPU a reduction over a whole array is off by up to 10 % (a single float32 accumulator): sums
    go axis by axis, the last one first, and long axes in blocks.
    """

    clip = staticmethod(mx.clip)
    maximum = staticmethod(mx.maximum)
    minimum = staticmethod(mx.minimum)
    take = staticmethod(mx.take)
    take_along_axis = staticmethod(mx.take_along_axis)
    expand_dims = staticmethod(mx.expand_dims)
    stop_gradient = staticmethod(mx.stop_gradient)
    permute_dims = staticmethod(mx.transpose)
    concat = staticmethod(mx.concatenate)
    stack = staticmethod(mx.stack)
    broadcast_to = staticmethod(mx.broadcast_to)

    matmul_dtype = "float32"  # Newton-Schulz in bfloat16 has overflowed on MLX

    @staticmethod
    def like(number: mx.array | float, x: mx.array) -> mx.array | float:
        return number.astype(x.dtype) if isinstance(number, mx.array) else number

    @staticmethod
    def constant(numbers: Sequence[float], shape: Sequence[int]) -> mx.array:
        return mx.array(list(numbers), dtype=mx.float32).reshape(tuple(shape))

    @staticmethod
    def scalar(number: mx.array | float) -> mx.array:
        if isinstance(number, mx.array):
            return number.astype(mx.float32).reshape(())
        return mx.array(number, dtype=mx.float32)

    @staticmethod
    def take_rows(x: mx.array, indices: mx.array) -> mx.array:
        def taken(x: mx.array) -> mx.array:
            return mx.take(x, indices, axis=0)

        differentiable: Any = mx.custom_function(taken)

        @differentiable.vjp
        def put_back(primal: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
            whole = mx.zeros(primal.shape, cotangent.dtype)
            whole[indices] = cotangent
            return whole

        return differentiable(x)

    @staticmethod
    def argsort(x: mx.array, axis: int = -1) -> mx.array:
        return mx.argsort(x, axis=axis).astype(mx.int32)

    @staticmethod
    def silu(x: mx.array) -> mx.array:
        return x * mx.sigmoid(x)

    @staticmethod
    def relu(x: mx.array) -> mx.array:
        return mx.maximum(x, 0)

    @staticmethod
    def matrix_transpose(x: mx.array) -> mx.array:
        return x.swapaxes(-1, -2)

    @staticmethod
    def qr(x: mx.array) -> tuple[mx.array, mx.array]:
        return mx.linalg.qr(x, stream=mx.cpu)  # MLX has no QR on a GPU

    @staticmethod
    def split(x: mx.array, parts: int | Sequence[int], axis: int = -1) -> Sequence[mx.array]:
        cuts = parts if isinstance(parts, int) else list(accumulate(parts))[:-1]
        return list(mx.split(x, cuts, axis=axis))

    @staticmethod
    def cumsum(x: mx.array, axis: int) -> mx.array:
        if not mx.issubdtype(x.dtype, mx.floating):
            return mx.cumsum(x, axis=axis)
        return mx.cumsum(x.astype(mx.float32), axis=axis).astype(x.dtype)

    @staticmethod
    def zeros(shape: Sequence[int], dtype: str = "float32") -> mx.array:
        return mx.zeros(tuple(shape), _dtype(dtype))

    @staticmethod
    def ones(shape: Sequence[int], dtype: str = "float32") -> mx.array:
        return mx.ones(tuple(shape), _dtype(dtype))

    @staticmethod
    def full_like(x: mx.array, value: float) -> mx.array:
        return mx.full(x.shape, value, x.dtype)

    @staticmethod
    def arange(n: int, dtype: str = "int32") -> mx.array:
        return mx.arange(n, dtype=_dtype(dtype))

    @staticmethod
    def astype(x: mx.array, dtype: str) -> mx.array:
        return x.astype(_dtype(dtype))

    @staticmethod
    def astype_like(x: mx.array, y: mx.array) -> mx.array:
        return x.astype(y.dtype)

    @staticmethod
    def sum(x: mx.array, axis: Axis = None, keepdims: bool = False) -> mx.array:
        axes, half = last_first(axis, x.ndim), x.dtype in (mx.bfloat16, mx.float16)
        total = x.astype(mx.float32) if half else x
        if mx.default_device() == mx.cpu:
            for a in axes:
                total = _sum(total, a)
            total = total if keepdims else total.squeeze(axes)
        else:
            total = total.sum(axes, keepdims=keepdims)
        return total.astype(x.dtype) if half else total

    @staticmethod
    def mean(x: mx.array, axis: Axis = None, keepdims: bool = False) -> mx.array:
        half = x.dtype in (mx.bfloat16, mx.float16)  # whose sum may be beyond its range
        total = MLXArrays.sum(x.astype(mx.float32) if half else x, axis, keepdims)
        return (total * (total.size / x.size)).astype(x.dtype)

    @staticmethod
    def max(x: mx.array, axis: Axis = None, keepdims: bool = False) -> mx.array:
        return x.max(axis, keepdims=keepdims)

    @staticmethod
    def logsumexp(x: mx.array, axis: int = -1, keepdims: bool = False) -> mx.array:
        if mx.default_device() == mx.cpu and x.shape[axis] > BLOCK:  # it adds sequentially there
            parts = mx.split(x, range(BLOCK, x.shape[axis], BLOCK), axis=axis)
            x = mx.concatenate([mx.logsumexp(y, axis=axis, keepdims=True) for y in parts], axis)
        return mx.logsumexp(x, axis=axis, keepdims=keepdims)


def _sum(x: mx.array, axis: int) -> mx.array:
    """Sum over one axis with keepdims; an axis of more than BLOCK elements in blocks."""
    n = x.shape[axis]
    if n <= BLOCK:
        return x.sum(axis, keepdims=True)
    whole, rest = (x, None) if n % BLOCK == 0 else mx.split(x, [n - n % BLOCK], axis=axis)
    shape = (*x.shape[:axis], n // BLOCK, BLOCK, *x.shape[axis + 1 :])
    total = _sum(whole.reshape(shape).sum(axis + 1), axis)
    return total if rest is None else total + rest.sum(axis, keepdims=True)


def _dtype(name: str) -> mx.Dtype:
    return mx.bool_ if name == "bool" else getattr(mx, name)
