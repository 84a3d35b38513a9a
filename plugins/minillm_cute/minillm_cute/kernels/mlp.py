"""MLPs by QuACK, for Hopper: the activation and its slope within the products around it.

The product in front of the activation writes both its argument and its value, and the product that gives the
hidden gradient multiplies it by the slope and computes the value again. So the passes over (N, F) between the
products are left out, and of arrays of that size only the activation's argument is kept for the backward pass.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, library
from torch.autograd import Function

from minillm_core import BackendError
from minillm_cute.kernels.hopper import check_hopper

__all__ = ["relu2_mlp", "served", "swiglu_mlp"]

ROWS = {"relu_sq": 1, "swiglu": 2}
"""Activation -> rows of the matrix in front of it for each hidden feature."""


def served(x: Tensor, plugin: str, instead: str) -> bool:
    """Return whether an array is multiplied by QuACK: in bfloat16 on a GPU, if gradients are computed.

    Args:
        x: the array.
        plugin: the plugin, for the error.
        instead: what to do instead.

    Raises:
        BackendError: training in another dtype than bfloat16.
    """
    if torch.is_grad_enabled() and x.dtype in (torch.float32, torch.float16):
        raise BackendError(
            f"{plugin} multiplies bfloat16, not {str(x.dtype).removeprefix('torch.')}",
            where=f"plugin '{plugin}', train.dtype",
            fix=f"train.dtype=bfloat16, or {instead}",
        )
    # not in evaluation, which works on any GPU and without QuACK
    return torch.is_grad_enabled() and x.is_cuda and x.dtype == torch.bfloat16


def relu2_mlp(
    x: Tensor,  # (..., C) bfloat16, C a multiple of 8
    up: Tensor,  # (F, C) bfloat16, F a multiple of 8
    down: Tensor,  # (C, F) bfloat16
) -> Tensor:
    """Return relu(x up^T)^2 down^T (..., C). 4 N C F FLOPs, 12 N C F with the backward pass."""
    return _MLP.apply(x.reshape(-1, x.shape[-1]), up, down, "relu_sq").reshape(x.shape)


def swiglu_mlp(
    x: Tensor,  # (..., C) bfloat16, C a multiple of 8
    gate: Tensor,  # (F, C) bfloat16, F a multiple of 8
    up: Tensor,  # (F, C) bfloat16
    down: Tensor,  # (C, F) bfloat16
) -> Tensor:
    """Return (silu(x gate^T) * x up^T) down^T (..., C). 6 N C F FLOPs, 18 N C F with the backward pass.

    QuACK computes gates and ups side by side, from one matrix (2 F, C) that has a row of each in turn.
    """
    both = torch.stack((gate, up), 1).flatten(0, 1)
    return _MLP.apply(x.reshape(-1, x.shape[-1]), both, down, "swiglu").reshape(x.shape)


class _MLP(Function):
    """(x (N, C), up (G, C), down (C, F), activation) -> y (N, C); G is F, and 2 F if a gate is beside each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, down: Tensor, activation: str) -> Tensor:
        before, h = _up(x, up, activation)  # (N, G), (N, F)
        ctx.save_for_backward(x, up, down, before)
        ctx.activation = activation
        return h @ down.T

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, up, down, before = ctx.saved_tensors
        dy = upstream[0]  # (N, C)
        of_x, of_up, of_down, _ = ctx.needs_input_grad  # weights may be frozen
        dbefore, h = _down_gradient(dy, down, before, ctx.activation)  # (N, G), (N, F)
        return (
            dbefore @ up if of_x else None,
            dbefore.T @ x if of_up else None,
            dy.T @ h if of_down else None,
            None,
        )


@cache
def _quack(device: torch.device) -> Any:
    """Import QuACK's products: here, since models with these MLPs are also read where QuACK is not installed.

    Raises:
        BackendError: the GPU is not a Hopper.
    """
    check_hopper(
        device,
        "QuACK's products run",
        where="plugins fused_relu2, fused_swiglu",
        fix="relu2 in place of fused_relu2; no plugin in place of fused_swiglu",
    )
    from quack import gemm_interface  # pyright: ignore[reportMissingImports]

    return gemm_interface


@library.custom_op("minillm_cute::mlp_up", mutates_args=())
def _up(x: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Compute x up^T (N, G), and its activation (N, F)."""
    rows, columns = x.contiguous(), up.contiguous().T
    before, h = _quack(x.device).gemm_act(rows, columns, activation=activation, tuned=False)
    return before, h


@_up.register_fake
def _(x: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    rows, wide = x.shape[0], up.shape[0]
    return x.new_empty((rows, wide)), x.new_empty((rows, wide // ROWS[activation]))


@library.custom_op("minillm_cute::mlp_down_gradient", mutates_args=())
def _down_gradient(
    dy: Tensor, down: Tensor, before: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """Compute dy down times the activation's slope (N, G), and the activation of ``before`` (N, F)."""
    operands = dy.contiguous(), down.contiguous(), before
    dbefore, h = _quack(dy.device).gemm_dact(*operands, activation=activation, tuned=False)
    return dbefore, h


@_down_gradient.register_fake
def _(dy: Tensor, down: Tensor, before: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(before), before.new_empty((dy.shape[0], down.shape[1]))
