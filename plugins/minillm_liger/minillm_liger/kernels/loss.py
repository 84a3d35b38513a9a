"""Linear cross-entropy by Liger: losses and both gradients chunk by chunk, in the forward pass.

Liger's chunks have about as many logits as ``hidden`` has numbers. The weight's gradient is summed
over them in float32, and the positions' weights are applied before that sum, so that one pass suffices.
Its function reads the number of targets back from the device: one synchronisation per micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward
from torch import Tensor, library
from torch.autograd import Function

from minillm_core import LossForm

__all__ = ["linear_cross_entropy"]

PLAIN = LossForm()
UNSUPERVISED = -1


def linear_cross_entropy(
    hidden: Tensor,  # (N, C)
    weight: Tensor,  # (V, C)
    targets: Tensor,  # (1, N) int32
    weights: Tensor | None = None,  # (1,) or (1, N)
    form: LossForm = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (total, sums (1,), count): see minillm's contract of the op.

    6 N C V FLOPs with the backward pass, 2 N C V without gradients. Memory besides the
    gradients: one chunk of logits, and the weight's gradient in float32.
    """
    if form.scale != 1.0:
        hidden = hidden * form.scale
    target = targets[0].clamp(min=UNSUPERVISED).long()  # (N,)
    factor = by_row = None
    if weights is not None and weights.ndim == 2:
        by_row = weights[0]
    elif weights is not None:
        factor = weights[0]  # a single factor can be applied outside
    arguments = (hidden, weight, target, by_row, *_constants(form))
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        total, losses = _Fused.apply(*arguments)
    else:
        losses = _fused(*arguments, False)[0]
        total = _total(losses, by_row)
    if factor is not None:
        total = total * factor
    return total, losses.sum().reshape(1), (target >= 0).sum(dtype=torch.float32)


class _Fused(Function):
    """(hidden, weight) -> (total, losses (N,)), with both gradients computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        by_row: Tensor | None,
        cap: float | None,
        smoothing: float,
        z: float,
    ) -> tuple[Tensor, Tensor]:
        losses, *grads = _fused(hidden, weight, target, by_row, cap, smoothing, z, True)
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(losses)
        return _total(losses, by_row), losses

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        by = upstream[0]  # () float32: the only differentiable output is the total
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * by, grad_weight * by, None, None, None, None, None


@library.custom_op(
    "minillm_liger::fused_linear_cross_entropy",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor target, Tensor? by_row, float? cap, "
    "float smoothing, float z, bool gradients) -> (Tensor, Tensor, Tensor)",
)
def _fused(
    hidden: Tensor,  # (N, C)
    weight: Tensor,  # (V, C)
    target: Tensor,  # (N,) int64
    by_row: Tensor | None,  # (N,) float32
    cap: float | None,
    smoothing: float,
    z: float,
    gradients: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute losses float32 (N,), unweighted, and the weighted sum's gradients, empty if not wanted.

    One op for torch.compile: Liger's function synchronises with the device.
    """
    with torch.no_grad():
        losses, _, _, _, grad_hidden, grad_weight, _ = fused_linear_cross_entropy_forward(
            hidden,
            weight,
            target,
            ignore_index=UNSUPERVISED,
            lse_square_scale=z,
            label_smoothing=smoothing,
            reduction="none",
            softcap=cap,
            accum_dtype=torch.float32,
            token_grad_output=by_row,
            compute_gradients=gradients,
            weight_requires_grad=gradients,
        )
    if not gradients:
        return losses, hidden.new_empty(0), weight.new_empty(0)
    return losses, grad_hidden, grad_weight


@_fused.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    by_row: Tensor | None,
    cap: float | None,
    smoothing: float,
    z: float,
    gradients: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    losses = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
    if not gradients:
        return losses, hidden.new_empty(0), weight.new_empty(0)
    return losses, torch.empty_like(hidden), torch.empty_like(weight)


def _constants(form: LossForm) -> tuple[float | None, float, float]:
    """Return Liger's arguments for a form: its tanh cap, label smoothing and z."""
    return getattr(form.cap, "cap", None), form.smoothing, form.z


def _total(losses: Tensor, by_row: Tensor | None) -> Tensor:
    return losses.sum() if by_row is None else (losses * by_row).sum()
