"""The array functions on torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from minillm_core.ops.arrays import Axis, Known, last_first


class TorchArrays(Known, module=torch):
    """The functions of :class:`minillm_core.ops.arrays.ArrayFunctions`, for torch.Tensor.

    Args:
        device: where zeros, ones and arange are created.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.matmul_dtype = "bfloat16" if self.device.type == "cuda" else "float32"

    clip = staticmethod(torch.clamp)
    silu = staticmethod(F.silu)
    relu = staticmethod(F.relu)
    full_like = staticmethod(torch.full_like)
    permute_dims = staticmethod(torch.permute)
    concat = staticmethod(torch.cat)
    stack = staticmethod(torch.stack)
    expand_dims = staticmethod(torch.unsqueeze)
    broadcast_to = staticmethod(torch.broadcast_to)
    stop_gradient = staticmethod(torch.detach)

    @staticmethod
    def like(number: Tensor | float, x: Tensor) -> Tensor | float:
        return number.to(x.dtype) if isinstance(number, Tensor) else number

    def constant(self, numbers: Sequence[float], shape: Sequence[int]) -> Tensor:
        # Filled on the device: a copy from the host would wait for it.
        return torch.cat([self.scalar(number).reshape(1) for number in numbers]).reshape(
            tuple(shape)
        )

    def scalar(self, number: Tensor | float) -> Tensor:
        if isinstance(number, Tensor):
            return number.float().reshape(())
        return torch.full((), number, dtype=torch.float32, device=self.device)

    @staticmethod
    def maximum(x: Tensor, y: Tensor | float) -> Tensor:
        return torch.maximum(x, y) if isinstance(y, Tensor) else x.clamp(min=y)

    @staticmethod
    def minimum(x: Tensor, y: Tensor | float) -> Tensor:
        return torch.minimum(x, y) if isinstance(y, Tensor) else x.clamp(max=y)

    @staticmethod
    def matrix_transpose(x: Tensor) -> Tensor:
        return x.transpose(-1, -2)

    @staticmethod
    def qr(x: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(torch.linalg.qr(x))

    @staticmethod
    def split(x: Tensor, parts: int | Sequence[int], axis: int = -1) -> Sequence[Tensor]:
        if isinstance(parts, int):
            return x.split(x.shape[axis] // parts, dim=axis)
        return x.split(list(parts), dim=axis)

    @staticmethod
    def take(x: Tensor, indices: Tensor, axis: int) -> Tensor:
        rows = x.index_select(axis, indices.reshape(-1).to(x.device))  # masks may be on the host
        return rows if indices.ndim else rows.squeeze(axis)

    @staticmethod
    def take_rows(x: Tensor, indices: Tensor) -> Tensor:
        return _Rows.apply(x, indices)

    @staticmethod
    def take_along_axis(x: Tensor, indices: Tensor, axis: int) -> Tensor:
        return torch.take_along_dim(x, indices.long(), axis)

    @staticmethod
    def argsort(x: Tensor, axis: int = -1) -> Tensor:
        return x.argsort(dim=axis).int()

    @staticmethod
    def cumsum(x: Tensor, axis: int) -> Tensor:
        return x.float().cumsum(axis).to(x.dtype) if x.is_floating_point() else x.cumsum(axis)

    def zeros(self, shape: Sequence[int], dtype: str = "float32") -> Tensor:
        return torch.zeros(tuple(shape), dtype=_dtype(dtype), device=self.device)

    def ones(self, shape: Sequence[int], dtype: str = "float32") -> Tensor:
        return torch.ones(tuple(shape), dtype=_dtype(dtype), device=self.device)

    def arange(self, n: int, dtype: str = "int32") -> Tensor:
        return torch.arange(n, dtype=_dtype(dtype), device=self.device)

    @staticmethod
    def astype(x: Tensor, dtype: str) -> Tensor:
        return x.to(_dtype(dtype))

    @staticmethod
    def astype_like(x: Tensor, y: Tensor) -> Tensor:
        return x.to(y.dtype)

    @staticmethod
    def sum(x: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
        return x.sum(last_first(axis, x.ndim), keepdim=keepdims)

    @staticmethod
    def mean(x: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
        return x.mean(last_first(axis, x.ndim), keepdim=keepdims)

    @staticmethod
    def max(x: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
        return x.amax(last_first(axis, x.ndim), keepdim=keepdims)

    @staticmethod
    def logsumexp(x: Tensor, axis: int = -1, keepdims: bool = False) -> Tensor:
        return x.logsumexp(axis, keepdim=keepdims)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x weight^T: x (..., C), weight (O, C) -> (..., O)."""
    if x.device.type == "cpu" and x.itemsize == 2:
        # On AMX oneDNN multiplies what follows each row of x in memory by zero, and NaN there stays
        # NaN: github.com/uxlfoundation/oneDNN/issues/5717. A slice of wider rows is copied.
        x = x.contiguous()
    return F.linear(x, weight)


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


class _Rows(Function):
    """The lookup of rows of (N, ...) at distinct indices, with a gradient that is written, not accumulated.

    autograd's own gradient accumulates: with atomics, or by sorting all indices first, as Inductor
    does for bfloat16.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.rows = x.shape[0]
        return x.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        (indices,), (by,) = ctx.saved_tensors, upstream
        whole = by.new_zeros((ctx.rows, *by.shape[1:]))
        return whole.index_copy_(0, indices.long(), by), None
