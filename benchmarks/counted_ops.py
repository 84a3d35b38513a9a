"""Two ops with device-dependent kernels, counted by their contracts and not computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from benchmarks.counting import StepCounter

__all__ = ["attention", "cross_entropy"]


def attention(counter: StepCounter) -> Callable[..., Tensor]:
    """Return a kernel of the op ``attention`` that counts without computing."""

    class Attention(Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, flops: int) -> Tensor:
            y = torch.empty_like(q)
            ctx.save_for_backward(q, k, v, y)
            ctx.flops = flops
            counter.product(flops, q, k, v, y)
            return y

        @staticmethod
        def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
            saved = ctx.saved_tensors
            grads = tuple(torch.empty_like(array) for array in saved[:3])
            counter.product(2 * ctx.flops, *saved, upstream[0], *grads)
            return *grads, None

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        rows, queries, heads, head_dim = q.shape
        seen = k.shape[1] if window is None else min(window, k.shape[1])
        return Attention.apply(q, k, v, 4 * rows * queries * seen * heads * head_dim)

    return attend


def cross_entropy(counter: StepCounter) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Return a kernel of the loss that counts without computing; logits in the compute dtype."""

    class Loss(Function):
        @staticmethod
        def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
            logits = hidden.new_empty((hidden.shape[0], weight.shape[0]))
            ctx.save_for_backward(hidden, weight)
            counter.product(2 * hidden.numel() * weight.shape[0], hidden, weight, logits, logits)
            return hidden.new_empty((), dtype=torch.float32)

        @staticmethod
        def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
            hidden, weight = ctx.saved_tensors
            logits = hidden.new_empty((hidden.shape[0], weight.shape[0]))
            grads = torch.empty_like(hidden), torch.empty_like(weight)
            flops = 4 * hidden.numel() * weight.shape[0]
            # their gradient is written once and read by both products
            counter.product(flops, hidden, weight, logits, logits, logits, *grads)
            return grads

    def loss(
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        weights: Tensor | None = None,
        form: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        zero = hidden.new_zeros((), dtype=torch.float32)
        return Loss.apply(hidden, weight), zero.expand(targets.shape[0]), zero

    return loss
