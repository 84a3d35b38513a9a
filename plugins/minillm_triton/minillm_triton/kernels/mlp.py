"""The ReLU squared MLP with fp8 products: both of the forward pass and, if wanted, all four of the backward pass.

Hopper multiplies fp8 only where both operands are contiguous along the summed axis. For the gradients of x and
of relu(.)^2 a weight is transposed, which is small; for a weight's gradient both operands are.
Rounding is plain code around single products, so that a compiled step fuses it: x is written in 8 bits by the
code that normalises or squares it, and a transposed copy by the code that writes the other one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library
from torch.autograd import Function

from minillm_core import BackendError
from minillm_triton.kernels.fp8 import (
    E4M3,
    MULTIPLE,
    check_device,
    largest,
    multiplied,
    power_of_two,
    scale_of,
    to_e4m3,
    to_e5m2,
)

__all__ = [
    "HEADROOM",
    "MIDDLE",
    "input_gradient",
    "relu2_mlp",
    "rounded_product",
    "served",
    "weight_gradient",
]

HEADROOM = 2.0  # factor by which a value may exceed the expected maximum before it is clipped
MIDDLE = 64.0  # what the largest gradient of y becomes: that of the hidden layer may be 896 times as large


def served(x: Tensor, *weights: Tensor) -> bool:
    """Return whether an array is multiplied in fp8: where something is trained.

    Raises:
        BackendError: training in another dtype than bfloat16, or on a GPU without fp8 products.
    """
    if not (torch.is_grad_enabled() and any(one.requires_grad for one in (x, *weights))):
        return False
    if x.dtype != torch.bfloat16:
        raise BackendError(
            f"fp8_mlp rounds from bfloat16, not from {str(x.dtype).removeprefix('torch.')}",
            where="plugin 'fp8_mlp', train.dtype",
            fix="train.dtype=bfloat16, or relu2 in its place",
        )
    check_device(x, "plugin 'fp8_mlp'", "leave plugin 'fp8_mlp' out")
    return True


def relu2_mlp(
    x: Tensor,  # (..., C) bfloat16, C a multiple of 16
    up: Tensor,  # (F, C) bfloat16, F a multiple of 16
    down: Tensor,  # (C, F) bfloat16
    expected_x: Tensor,  # () float32: the previous largest absolute value of x
    expected_h: Tensor,  # () float32: that of relu(x up^T)^2
    *,
    narrow: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return relu(x up^T)^2 down^T (..., C), and this step's largest values, () float32 each.

    4 N C F FLOPs forward in fp8, and 8 N C F backward, in fp8 too with ``narrow``, which rounds the
    gradients of y and of x up^T to e5m2. A weight's scale is computed from its own largest value, the
    gradients' from the largest one of y, and those of x and relu(.)^2 from the expected ones, which
    they may exceed twofold.
    """
    rows = x.reshape(-1, x.shape[-1])
    y, of_x, of_h = _MLP.apply(rows, up, down, expected_x, expected_h, narrow)
    return y.reshape(x.shape), of_x, of_h


class _MLP(Function):
    """(x (N, C), up (F, C), down (C, F)) -> (y (N, C), (), ()). Gradients treat rounded operands as equal to them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor,
        down: Tensor,
        expected_x: Tensor,
        expected_h: Tensor,
        narrow: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        before = rounded_product(x, up, expected_x)  # (N, F)
        h = before.relu().square()
        y = rounded_product(h, down, expected_h)
        ctx.save_for_backward(x, up, down, before, expected_x, expected_h)
        ctx.narrow = narrow
        largest_values = largest(x).float(), largest(h).float()
        ctx.mark_non_differentiable(*largest_values)
        return y, *largest_values

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, up, down, before, expected_x, expected_h = ctx.saved_tensors
        dy, relu = upstream[0], before.relu()  # (N, C), (N, F)
        by = power_of_two(largest(dy) / MIDDLE) if ctx.narrow else None
        dh = input_gradient(dy, down, by) * (2.0 * relu)  # (N, F), of x up^T
        of_x, of_up, of_down, *_ = ctx.needs_input_grad  # weights may be frozen
        return (
            input_gradient(dh, up, by) if of_x else None,
            weight_gradient(dh, x, by, expected_x) if of_up else None,
            weight_gradient(dy, relu.square(), by, expected_h) if of_down else None,
            *(3 * [None]),
        )


def rounded_product(x: Tensor, weight: Tensor, expected: Tensor) -> Tensor:
    """Compute x (N, I) weight^T (N, O) in fp8."""
    by_x, by = scale_of_expected(expected), scale_of(weight)
    return _product(to_e4m3(x, by_x), to_e4m3(weight, by), by_x, by, x.dtype, True)


def scale_of_expected(most: Tensor) -> Tensor:
    """Return the power of two by which values up to twice the expected maximum fit into e4m3: float32 ()."""
    return power_of_two(most * (HEADROOM / torch.finfo(E4M3).max))


def input_gradient(dy: Tensor, weight: Tensor, by: Tensor | None) -> Tensor:
    """Compute dy (N, O) weight (N, I), in fp8 where dy has a scale."""
    if by is None:
        return dy @ weight
    by_weight = scale_of(weight)
    return _product(to_e5m2(dy, by), to_e4m3(weight.T, by_weight), by, by_weight, dy.dtype, False)


def weight_gradient(dy: Tensor, x: Tensor, by: Tensor | None, expected: Tensor) -> Tensor:
    """Compute dy^T (O, N) x (N, I), in fp8 where dy has a scale."""
    if by is None:
        return dy.T @ x
    by_x, short = scale_of_expected(expected), -len(x) % MULTIPLE
    if short:  # a product sums over whole blocks: rows of 0 add nothing
        dy, x = (torch.nn.functional.pad(one, (0, 0, 0, short)) for one in (dy, x))
    # contiguous() here, not in the product: the compiled step writes the transposed copy while it rounds
    a, b = to_e5m2(dy, by).T.contiguous(), to_e4m3(x, by_x).T.contiguous()
    return _product(a, b, by, by_x, dy.dtype, False)


@library.custom_op(
    "minillm_triton::fp8_product",
    mutates_args=(),
    schema="(Tensor a, Tensor b, Tensor by_a, Tensor by_b, ScalarType dtype, bool fast) -> Tensor",
)
def _product(
    a: Tensor,  # (n, k), 8 bits
    b: Tensor,  # (m, k), 8 bits
    by_a: Tensor,
    by_b: Tensor,
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """Compute a b^T (n, m), both times their scales."""
    return multiplied(a.contiguous(), b.contiguous().T, by_a, by_b, dtype, fast=fast)


@_product.register_fake
def _(a: Tensor, b: Tensor, by_a: Tensor, by_b: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)
