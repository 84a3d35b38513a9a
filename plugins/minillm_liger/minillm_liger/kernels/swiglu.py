"""SwiGLU by Liger: silu(gate) * up in one pass; the sigmoid is recomputed in the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from liger_kernel.ops.swiglu import swiglu_backward, swiglu_forward
from torch import Tensor
from torch.autograd import Function

__all__ = ["swiglu"]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up, both (..., F)."""
    return _SwiGLU.apply(gate, up)


class _SwiGLU(Function):
    """A pure function: Liger's own writes the gradients over the arguments, here over copies of them."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return swiglu_forward(gate.contiguous(), up.contiguous())[2]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        copies = (x.clone(memory_format=torch.contiguous_format) for x in ctx.saved_tensors)
        return swiglu_backward(*copies, upstream[0].contiguous())
