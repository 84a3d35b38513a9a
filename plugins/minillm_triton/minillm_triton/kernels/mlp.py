"""An fp8 matrix product with bfloat16 gradients.

Hopper multiplies fp8 only where both operands are contiguous along the summed axis: for the weight's gradient
both would have to be transposed in memory, which costs what the product saves. So the backward pass is unchanged.
Rounding is plain code around a single op, so that a compiled step fuses it:
x is written once in 8 bits, by the code that normalises or squares it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from minillm_core import BackendError
from minillm_triton.kernels.fp8 import (
    E4M3,
    check_device,
    largest,
    multiplied,
    power_of_two,
    to_e4m3,
)

__all__ = ["HEADROOM", "fp8_linear", "served"]

HEADROOM = 2.0  # factor by which a value may exceed the expected maximum before it is clipped


def served(x: Any) -> bool:
    """Return whether an array is multiplied in fp8; in evaluation other dtypes are not.

    Raises:
        BackendError: training in another dtype than bfloat16, or on a GPU without fp8 products.
    """
    if not isinstance(x, Tensor):
        return False  # the kit's NumPy references
    if x.dtype == torch.bfloat16:
        check_device(x, "plugin 'fp8_mlp'", "leave plugin 'fp8_mlp' out")
        return True
    if torch.is_grad_enabled() and x.dtype in (torch.float32, torch.float16):
        raise BackendError(
            f"fp8_mlp rounds from bfloat16, not from {str(x.dtype).removeprefix('torch.')}",
            where="plugin 'fp8_mlp', train.dtype",
            fix="train.dtype=bfloat16, or relu2 in its place",
        )
    return False


def fp8_linear(
    x: Tensor,  # (..., C) bfloat16, C a multiple of 16
    weight: Tensor,  # (O, C) bfloat16, O a multiple of 16
    expected: Tensor,  # () float32: the previous largest absolute value of x
) -> tuple[Tensor, Tensor]:
    """Return x weight^T (..., O), and the largest absolute value of x, () float32.

    2 N C O FLOPs in fp8; 4 N C O in bfloat16 backward. The weight's scale is computed from its own
    largest value; that of x from ``expected``, which it may exceed twofold.
    """
    rows, matrix = x.detach().reshape(-1, x.shape[-1]), weight.detach()
    most = torch.finfo(E4M3).max
    by_x = power_of_two(expected * (HEADROOM / most))
    by_weight = power_of_two(largest(matrix) / most)
    y = _product(
        *(x.reshape(rows.shape), weight),
        *(to_e4m3(rows, by_x), to_e4m3(matrix, by_weight)),
        *(by_x, by_weight),
    )
    return y.reshape(*x.shape[:-1], -1), largest(rows).float()


@library.custom_op(
    "minillm_triton::fp8_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor x8, Tensor weight8, Tensor by_x, Tensor by_weight) -> Tensor",
)
def _product(
    x: Tensor,  # (N, C), rounded to x8: the gradients treat both as equal
    weight: Tensor,  # (O, C), likewise
    x8: Tensor,  # (N, C) e4m3
    weight8: Tensor,  # (O, C) e4m3
    by_x: Tensor,
    by_weight: Tensor,
) -> Tensor:
    rows, columns = x8.contiguous(), weight8.contiguous().T
    return multiplied(rows, columns, by_x, by_weight, x.dtype, fast=True)


@_product.register_fake
def _(
    x: Tensor, weight: Tensor, x8: Tensor, weight8: Tensor, by_x: Tensor, by_weight: Tensor
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    of_x = dy @ weight if ctx.needs_input_grad[0] else None
    of_weight = dy.T @ x if ctx.needs_input_grad[1] else None
    return of_x, of_weight, None, None, None, None


_product.register_autograd(_gradients, setup_context=_keep)
