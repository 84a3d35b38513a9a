"""The ReLU squared MLP by QuACK, for Hopper: the activation and its slope within the products around it.

The product with Wup also writes its squared ReLU, and the product that gives the hidden gradient multiplies it
by the slope and squares the ReLU again: two passes over (N, F) between the products, which move 5 N F numbers,
are left out, and only one array of (N, F) is kept for the backward pass.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, library
from torch.autograd import Function

from minillm_core import BackendError

__all__ = ["relu2_mlp", "served"]

HOPPER = (9, 0)


def served(x: Tensor) -> bool:
    """Return whether an array is multiplied by QuACK: in bfloat16 on a GPU; in evaluation other dtypes are not.

    Raises:
        BackendError: training in another dtype than bfloat16.
    """
    if torch.is_grad_enabled() and x.dtype in (torch.float32, torch.float16):
        raise BackendError(
            f"fused_relu2 multiplies bfloat16, not {str(x.dtype).removeprefix('torch.')}",
            where="plugin 'fused_relu2', train.dtype",
            fix="train.dtype=bfloat16, or relu2 in its place",
        )
    return x.is_cuda and x.dtype == torch.bfloat16


def relu2_mlp(
    x: Tensor,  # (..., C) bfloat16, C a multiple of 8
    up: Tensor,  # (F, C) bfloat16, F a multiple of 8
    down: Tensor,  # (C, F) bfloat16
) -> Tensor:
    """Return relu(x up^T)^2 down^T (..., C). 4 N C F FLOPs, 12 N C F with the backward pass."""
    rows = x.reshape(-1, x.shape[-1])
    return _MLP.apply(rows, up, down).reshape(x.shape)


class _MLP(Function):
    """(x (N, C), up (F, C), down (C, F)) -> y (N, C)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        before, h = _up(x, up)  # (N, F) both
        ctx.save_for_backward(x, up, down, before)
        return h @ down.T

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, up, down, before = ctx.saved_tensors
        dy = upstream[0]  # (N, C)
        of_x, of_up, of_down = ctx.needs_input_grad  # weights may be frozen
        dbefore, h = _down_gradient(dy, down, before)  # (N, F) both
        return (
            dbefore @ up if of_x else None,
            dbefore.T @ x if of_up else None,
            dy.T @ h if of_down else None,
        )


@cache
def _quack(device: torch.device) -> Any:
    """Import QuACK's products: here, since models with this MLP are also read where QuACK is not installed.

    Raises:
        BackendError: the GPU is not a Hopper.
    """
    if (found := torch.cuda.get_device_capability(device)) != HOPPER:
        raise BackendError(
            f"QuACK's products run on Hopper GPUs, of capability 9.0, not {found[0]}.{found[1]}",
            where="plugin 'fused_relu2'",
            fix="relu2 in its place",
        )
    from quack import gemm_interface  # pyright: ignore[reportMissingImports]

    return gemm_interface


@library.custom_op("minillm_cute::relu2_up", mutates_args=())
def _up(x: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Compute x up^T (N, F), and the square of its ReLU."""
    rows, columns = x.contiguous(), up.contiguous().T
    before, h = _quack(x.device).gemm_act(rows, columns, activation="relu_sq", tuned=False)
    return before, h


@_up.register_fake
def _(x: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    before = x.new_empty((x.shape[0], up.shape[0]))
    return before, torch.empty_like(before)


@library.custom_op("minillm_cute::relu2_down_gradient", mutates_args=())
def _down_gradient(dy: Tensor, down: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Compute dy down times the slope 2 relu(before), and relu(before)^2, (N, F) both."""
    operands = dy.contiguous(), down.contiguous(), before
    dbefore, h = _quack(dy.device).gemm_dact(*operands, activation="relu_sq", tuned=False)
    return dbefore, h


@_down_gradient.register_fake
def _(dy: Tensor, down: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(before), torch.empty_like(before)
