"""Linear cross-entropy by QuACK, for Hopper: losses and both gradients in one pass, chunk by chunk.

A chunk's product leaves exponentials of logits, each relative to a power of two of its tile, instead of
logits; the two products of the gradients take them as they are, and scale while they load. The weight's
gradient is summed over chunks in float32. With a softcap: :mod:`minillm_cute.kernels.capped_loss`.
"""

from __future__ import annotations

from typing import Any

import torch
from quack.linear_cross_entropy import (  # pyright: ignore[reportMissingImports]
    scaled_exp_linear_cross_entropy_fwd,
)
from torch import Tensor, library
from torch.autograd import Function

from minillm_core import LossForm, SigmoidCap, TanhCap
from minillm_cute.kernels.capped_loss import capped_losses
from minillm_cute.kernels.hopper import check_hopper

__all__ = ["linear_cross_entropy"]

PLAIN = LossForm()
UNSUPERVISED = -1
CHUNK = 4096  # rows: 0.4 GiB of exponentials for a vocabulary of 50,304


def linear_cross_entropy(
    hidden: Tensor,  # (N, C) bfloat16, C a multiple of 8
    weight: Tensor,  # (V, C), V a multiple of 128
    targets: Tensor,  # (1, N) int32
    weights: Tensor | None = None,  # (1,)
    form: LossForm = PLAIN,  # a softcap alone, and with it a scale
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (total, sums (1,), count): see minillm's contract of the op.

    6 N C V FLOPs with the backward pass, 2 N C V without gradients. Memory besides the gradients, of
    which the weight's is float32: one chunk of exponentials, half as large with a softcap.

    Raises:
        BackendError: the GPU is not a Hopper.
    """
    target = targets[0].clamp(min=UNSUPERVISED)  # (N,)
    cap = _tanh_of(form)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        wanted = hidden.requires_grad, weight.requires_grad
        total = _Fused.apply(hidden, weight, target, cap, *wanted)
    else:
        total = _fused(hidden, weight, target, cap, False, False)[0].sum()
    sums = total.detach().reshape(1)
    if weights is not None:
        total = total * weights[0]
    return total, sums, (target >= 0).sum(dtype=torch.float32)


def _tanh_of(form: LossForm) -> list[float]:
    """Return the logits as ``middle + height tanh(rate product + shift)``, or nothing without a softcap."""
    if isinstance(form.cap, TanhCap):
        return [0.0, form.cap.cap, form.scale / form.cap.cap, 0.0]
    if isinstance(form.cap, SigmoidCap):  # sigmoid(x) = (1 + tanh(x / 2)) / 2
        half, twice = form.cap.a / 2.0, 2.0 * form.cap.c
        return [half, half, form.scale / twice, form.cap.b / twice]
    return []


class _Fused(Function):
    """(hidden, weight) -> total, with both gradients computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        cap: list[float],
        of_hidden: bool,
        of_weight: bool,
    ) -> Tensor:
        losses, *grads = _fused(hidden, weight, target, cap, of_hidden, of_weight)
        ctx.save_for_backward(*grads)
        ctx.wanted, ctx.dtype = (of_hidden, of_weight), weight.dtype
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        by = upstream[0]  # () float32
        grad_hidden, grad_weight = ctx.saved_tensors
        of_hidden, of_weight = ctx.wanted
        hidden = (grad_hidden * by).to(grad_hidden.dtype) if of_hidden else None
        weight = None
        if of_weight:  # directly in its dtype: a float32 product would take 4 V C bytes more
            weight = torch.empty_like(grad_weight, dtype=ctx.dtype)
            torch.mul(grad_weight, by, out=weight)
        return hidden, weight, *(4 * [None])


@library.custom_op(
    "minillm_cute::linear_cross_entropy",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor target, float[] cap, bool of_hidden, bool of_weight) "
    "-> (Tensor, Tensor, Tensor)",
)
def _fused(
    hidden: Tensor,  # (N, C)
    weight: Tensor,  # (V, C)
    target: Tensor,  # (N,) int32
    cap: list[float],
    of_hidden: bool,
    of_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute losses float32 (N,), 0 where unsupervised, and their sum's gradients, empty if not wanted.

    The gradient of ``weight`` is float32. QuACK pads the rows to a multiple of 128.
    """
    where, fix = "--kernels linear_cross_entropy=quack", "cute.loss=false"
    check_hopper(hidden.device, "QuACK's loss runs", where=where, fix=fix)
    hidden, weight, rows = hidden.contiguous(), weight.contiguous(), len(hidden)
    if cap:
        return capped_losses(hidden, weight, target, cap, of_hidden, of_weight)
    losses, grad_hidden, grad_weight = scaled_exp_linear_cross_entropy_fwd(
        hidden,
        weight,
        target,
        CHUNK,
        UNSUPERVISED,
        need_dx=of_hidden,
        need_dw=of_weight,
    )
    return (
        _first(losses, rows),
        hidden.new_empty(0) if grad_hidden is None else _first(grad_hidden, rows),
        weight.new_empty(0) if grad_weight is None else grad_weight,
    )


@_fused.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    cap: list[float],
    of_hidden: bool,
    of_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden.new_empty(len(hidden), dtype=torch.float32),
        torch.empty_like(hidden) if of_hidden else hidden.new_empty(0),
        torch.empty_like(weight, dtype=torch.float32) if of_weight else weight.new_empty(0),
    )


def _first(x: Tensor, rows: int) -> Tensor:
    """Return the first rows of x; a copy if it has more, since no output may be part of another array."""
    return x if len(x) == rows else x[:rows].clone()
