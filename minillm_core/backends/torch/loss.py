"""Linear cross-entropy on torch: dense, in chunks of rows, and torch's own.

Per position, a dense head of V logits in bfloat16 takes 2V bytes for the logits and 2V to 8V for
their gradient: 6 GiB and more for 65,536 positions and V = 50,304. The chunked kernel holds one chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from minillm_core.backends.torch.arrays import linear
from minillm_core.ops.form import LossForm

PLAIN = LossForm()
CHUNK_BYTES = 2**30  # largest logits of one chunk on a GPU, in their compute dtype, compiled
EAGER_BYTES = 2**28  # the same in eager mode, which also holds two float32 copies of them
CPU_ROWS = 256  # rows of a chunk on a CPU: enough for fast products, few enough for the caches
LONG = 2**15  # logits of a row above which torch's log_softmax is too inexact on some CPUs


def dense(
    hidden: Tensor,  # (N, C)
    weight: Tensor,  # (V, C)
    targets: Tensor,  # (K, N) int32
    weights: Tensor | None = None,  # (K,) or (K, N)
    form: LossForm = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the loss from all logits at once; autograd computes the gradient.

    6 N C V FLOPs with the backward pass; N V (compute dtype + 2 x float32) bytes in eager mode.
    """
    loss, _, _ = _chunk_losses(hidden, weight, targets, form)
    total, sums = _summed(loss, targets, _scale(targets, weights, loss.dtype))
    return total, sums.detach(), _count(targets)


def chunked(
    hidden: Tensor,  # (N, C)
    weight: Tensor,  # (V, C)
    targets: Tensor,  # (K, N) int32
    weights: Tensor | None = None,  # (K,) or (K, N)
    form: LossForm = PLAIN,
    *,
    rows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute losses and gradients chunk by chunk, both in the forward pass.

    The same 6 N C V FLOPs as :func:`dense`; in addition to the gradients that it returns it holds one
    chunk: rows x V logits (compute dtype and float32) and a float32 (V, C) gradient. If no gradient is
    needed it computes only the losses, 2 N C V FLOPs.

    Args:
        hidden: the hidden states after the last norm.
        weight: the head.
        targets: see the contract.
        weights: see the contract; constants.
        form: see the contract.
        rows: positions per chunk; default: :func:`chunk_rows`.
    """
    rows = rows or chunk_rows(hidden, weight)
    scale = _scale(targets, weights, _wide(hidden.dtype))
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        learnt = weight.requires_grad  # a frozen head saves a third of the FLOPs
        total, sums = _Chunked.apply(hidden, weight, targets, scale, form, rows, learnt)
    else:
        total, sums = _summed(_all_losses(hidden, weight, targets, form, rows), targets, scale)
    return total, sums, _count(targets)


def native(
    hidden: Tensor,  # (N, C)
    weight: Tensor,  # (V, C)
    targets: Tensor,  # (1, N) int32
    weights: Tensor | None = None,  # (1,)
    form: LossForm = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """Call torch's own chunked ``F.linear_cross_entropy``: eager mode, one target, empty form."""
    (main,) = targets
    supervised = main >= 0  # (N,)
    loss = F.linear_cross_entropy(
        hidden,
        weight,
        torch.where(supervised, main, -100).long(),
        reduction="sum",
        ignore_index=-100,
        options=torch.nn.LinearCrossEntropyOptions(),
    ).float()
    total = loss if weights is None else loss * weights.sum()
    return total, loss.detach().reshape(1), supervised.sum(dtype=torch.float32)


def token_losses(
    hidden: Tensor,  # (N, C)
    weight: Tensor,  # (V, C)
    targets: Tensor,  # (N,) int32
    form: LossForm = PLAIN,
) -> Tensor:
    """Compute each position's loss (N,), chunk by chunk, without gradient: holds one chunk's logits."""
    hidden, weight = hidden.detach(), weight.detach()
    found = _all_losses(hidden, weight, targets[None], form, chunk_rows(hidden, weight))
    return torch.where(targets >= 0, found[0], 0.0)


def chunk_rows(hidden: Tensor, weight: Tensor) -> int:
    """Choose the number of rows per chunk: on a GPU, N halved until the chunk's logits are small enough.

    Halving a power of two makes all chunks the same size, so that Inductor compiles one set of kernels.
    """
    if hidden.device.type == "cpu":
        return CPU_ROWS
    positions, row_bytes = hidden.shape[0], weight.shape[0] * hidden.element_size()
    largest = CHUNK_BYTES if torch.compiler.is_compiling() else EAGER_BYTES
    chunks = 1
    while -(-positions // chunks) * row_bytes > largest and chunks < positions:
        chunks *= 2
    return max(1, -(-positions // chunks))


class _Chunked(Function):
    """The autograd function (hidden, weight) -> (total, sums), which computes both gradients in its forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: Tensor,
        form: LossForm,
        rows: int,
        learnt: bool,
    ) -> tuple[Tensor, Tensor]:
        losses, grads_hidden = [], []
        # In float32: 8 to 32 partial sums in bfloat16 would lose the gradients of rare tokens.
        rows_learnt = weight if learnt else weight[:0]
        grad_weight = torch.zeros_like(rows_learnt, dtype=_wide(weight.dtype))  # (V, C)
        # (rows, C), (K, rows), (K, rows)
        chunks = zip(hidden.split(rows), targets.split(rows, 1), scale.split(rows, 1), strict=True)
        for h, t, s in chunks:
            if grads_hidden and torch.compiler.is_compiling():
                # Chunks gather their targets from the same array, so Inductor would fuse them into
                # one kernel after all their logits: this makes each chunk depend on the one before.
                s = s + 0.0 * grads_hidden[-1][0, 0]
            loss, logits, log_p = _chunk_losses(h, weight, t, form)
            losses.append(loss)
            d = _logit_gradient(logits, log_p, t, s, form).to(h.dtype)  # (rows, V)
            grads_hidden.append(d @ weight)
            if learnt:
                grad_weight = _add_product(grad_weight, d, h)
        # Summed here, not per chunk: Inductor would fuse all chunks' sums into one kernel in the place
        # of the first, and so run the other chunks' products before it and hold all logits.
        total, sums = _summed(torch.cat(losses, dim=1), targets, scale)
        ctx.save_for_backward(torch.cat(grads_hidden), grad_weight)
        ctx.dtypes, ctx.learnt = (hidden.dtype, weight.dtype), learnt
        ctx.mark_non_differentiable(sums)
        return total, sums

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        by = upstream[0]  # () float32: the only differentiable output is the total
        of_weight = (grad_weight * by).to(weight_dtype) if ctx.learnt else None
        return (grad_hidden * by).to(hidden_dtype), of_weight, None, None, None, None, None


def _scale(targets: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return each loss's weight, 0 where unsupervised: (K, N)."""
    supervised = (targets >= 0).to(dtype)
    if weights is None:
        return supervised
    return supervised * (weights if weights.ndim == 2 else weights[:, None])


def _count(targets: Tensor) -> Tensor:
    """Count the supervised positions of the main target, () float32."""
    return (targets[0] >= 0).sum(dtype=torch.float32)


def _all_losses(h: Tensor, weight: Tensor, targets: Tensor, form: LossForm, rows: int) -> Tensor:
    """Compute the losses (K, N), by chunks of rows; arbitrary where unsupervised."""
    chunks = zip(h.split(rows), targets.split(rows, 1), strict=True)
    return torch.cat([_chunk_losses(h, weight, t, form)[0] for h, t in chunks], dim=1)


def _chunk_losses(
    h: Tensor, weight: Tensor, targets: Tensor, form: LossForm
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute loss (K, n), capped logits (n, V) and their log-softmax (n, V), all float32.

    The loss is arbitrary where unsupervised.
    """
    product = linear(h, weight)
    logits = form.logits(torch, product.to(_wide(product.dtype)))
    log_p = _log_softmax(logits)
    mean = log_p.mean(-1) if form.smoothing else None
    lse = logits.logsumexp(-1) if form.z else None
    return form.loss(_picked(log_p, targets), mean, lse), logits, log_p


def _log_softmax(logits: Tensor) -> Tensor:
    """Compute the log-softmax (n, V)."""
    # With AVX2 alone, torch's adds the exponentials of a lane in turn: off by 1e-4 nats for V = 65,539.
    if logits.is_cpu and logits.shape[-1] > LONG and not torch.compiler.is_compiling():
        return logits - logits.logsumexp(-1, keepdim=True)
    return F.log_softmax(logits, dim=-1)


def _picked(log_p: Tensor, targets: Tensor) -> Tensor:
    """Return log_p[n, targets[k, n]] as (K, n); arbitrary where unsupervised."""
    if not torch.compiler.is_compiling():
        return log_p.gather(1, _ids(targets).T).T
    # A masked sum fuses with the reduction that computes log_p. A gather would be a kernel of its own,
    # which Inductor merges with those of other chunks, so that all their logits stay alive until then;
    # and its gradient would be a scatter, which does not fuse.
    columns = torch.arange(log_p.shape[1], device=log_p.device)
    return torch.stack(
        [torch.where(columns == ids[:, None], log_p, 0.0).sum(-1) for ids in targets.unbind(0)]
    )


def _summed(loss: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Sum losses (K, n) to a weighted total () and unweighted sums (K,)."""
    return (loss * scale).sum(), torch.where(targets >= 0, loss, 0.0).sum(-1)


def _logit_gradient(
    logits: Tensor,  # (n, V) float32, capped
    log_p: Tensor,  # (n, V) float32: overwritten
    targets: Tensor,  # (K, n)
    scale: Tensor,  # (K, n)
    form: LossForm,
) -> Tensor:
    """Compute the gradient of the weighted losses with respect to hidden weight^T, (n, V) float32."""
    by_row = scale.sum(0)  # (n,): the factor of p, summed over targets
    factor = by_row * (1.0 + 2.0 * form.z * logits.logsumexp(-1)) if form.z else by_row
    d = log_p.exp_().mul_(factor[:, None])
    if form.smoothing:
        d = d - by_row[:, None] * (form.smoothing / logits.shape[-1])
    d = _subtract_at(d, _ids(targets), scale * (1.0 - form.smoothing))
    return form.pull_back(logits, d)


def _subtract_at(d: Tensor, ids: Tensor, amounts: Tensor) -> Tensor:
    """Compute d[n, ids[k, n]] -= amounts[k, n]; d (n, V), ids and amounts (K, n)."""
    if not torch.compiler.is_compiling():
        return d.scatter_add_(1, ids.T, -amounts.T)
    # A comparison fuses into the surrounding pointwise kernel; a scatter would split it into three.
    columns = torch.arange(d.shape[1], device=d.device)
    for column, amount in zip(ids.unbind(0), amounts.unbind(0), strict=True):
        d = d - torch.where(columns == column[:, None], amount[:, None], 0.0)
    return d


def _add_product(total: Tensor, d: Tensor, h: Tensor) -> Tensor:
    """Return total (V, C), float32, + d^T h; d (n, V), h (n, C) in the compute dtype."""
    if d.dtype == total.dtype:
        return total.addmm_(d.T, h)
    if d.is_cuda:  # torch 2.11 does not trace addmm with an out_dtype
        return total + torch.mm(d.T, h, out_dtype=total.dtype)
    if d.dtype == torch.float16:  # a sum over rows may leave float16's range
        return total.addmm_(d.T.to(total.dtype), h.to(total.dtype))
    return total + (d.T @ h)


def _ids(targets: Tensor) -> Tensor:
    """Clamp targets to valid indices, int64."""
    return targets.clamp(min=0).long()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
