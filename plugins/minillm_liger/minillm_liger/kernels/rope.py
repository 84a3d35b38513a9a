"""Rotary position embedding by Liger: q and k in one launch, in float32.

Liger's kernel works in place; it is given copies here, so that neither the arguments nor
gradients shared with other operations are modified.
"""

from __future__ import annotations

from typing import Any

import torch
from liger_kernel.ops.rope import rope_backward, rope_forward
from torch import Tensor
from torch.autograd import Function

from minillm_core import Rotary

__all__ = ["rotate"]


def rotate(q: Tensor, k: Tensor, table: Rotary) -> tuple[Tensor, Tensor]:
    """Rotate q (B, T, H, D) and k (B, T, K, D) by their position's angles."""
    if table.positions is None:
        cos, sin = (x.narrow(0, 0, q.shape[1]) for x in (table.cos, table.sin))
    else:
        cos, sin = table.cos[table.positions], table.sin[table.positions]
    return _Rotate.apply(q, k, cos, sin)


class _Rotate(Function):
    """q, k -> q, k; cos and sin (T, D/2) or (B, T, D/2)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _turned(rope_forward, q, k, cos, sin)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return *_turned(rope_backward, *upstream, *ctx.saved_tensors), None, None


def _turned(function: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Call Liger's function on copies, whose layout it expects and returns as (B, H, T, D)."""
    q, k = (x.clone(memory_format=torch.contiguous_format).transpose(1, 2) for x in (q, k))
    q, k, *_ = function(q, k, cos, sin, rotary_dim=q.shape[-1])
    return q.transpose(1, 2), k.transpose(1, 2)
