"""Linear cross-entropy on torch: dense, in chunks of rows, and torch's own.

Per position, a dense head of V logits in bfloat16 costs 2V bytes for the logits and 2V to 8V for
their gradient: 6 GiB and more for 65,536 positions of 50,304. The chunked kernel holds one chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from minillm_core.ops.contract import LossForm

__all__ = ["CHUNK_BYTES", "chunk_rows", "chunked", "dense", "native"]

PLAIN = LossForm()
CHUNK_BYTES = 2**30  # largest logits of one chunk on a GPU, in their compute dtype
CPU_ROWS = 256  # a chunk on a CPU: enough for the products, near enough to the caches


def dense(
    hidden: Tensor,  # (N, C)
    weight: Tensor,  # (V, C)
    targets: Tensor,  # (K, N) int32
    weights: Tensor | None = None,  # (K,) or (K, N)
    form: LossForm = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """All logits at once, autograd behind it.

    6 N C V FLOPs with the backward pass; N V (compute dtype + 2 x float32) bytes in eager mode.
    """
    logits = form.logits(torch, _accumulated(F.linear(hidden, weight)))  # (N, V) float32
    ids, scale = _supervision(targets, weights, _wide(hidden.dtype))
    loss = _losses(logits, F.log_softmax(logits, dim=-1), ids, form)
    return _reported(loss, targets, scale)


def chunked(
    hidden: Tensor,  # (N, C)
    weight: Tensor,  # (V, C)
    targets: Tensor,  # (K, N) int32
    weights: Tensor | None = None,  # (K,) or (K, N)
    form: LossForm = PLAIN,
    *,
    rows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses and gradients chunk by chunk, both in the forward pass.

    The same 6 N C V FLOPs as :func:`dense`; beside the gradients it returns, it holds one chunk:
    rows x V logits (compute dtype and float32) and a float32 (V, C) gradient. Where nothing asks
    for a gradient it computes losses only, 2 N C V FLOPs.

    Args:
        hidden: the stream after its last norm.
        weight: the head.
        targets: see the contract.
        weights: see the contract; constants.
        form: see the contract.
        rows: positions in a chunk; by default as many as :func:`chunk_rows` says.
    """
    rows = rows or chunk_rows(hidden, weight)
    ids, scale = _supervision(targets, weights, _wide(hidden.dtype))
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        total, loss = _Chunked.apply(hidden, weight, ids, scale, form, rows)
    else:
        chunks = zip(hidden.split(rows), ids.split(rows, 1), strict=True)
        loss = torch.cat([_chunk_losses(h, weight, i, form)[0] for h, i in chunks], dim=1)
        total = (loss * scale).sum()
    _, sums, count = _reported(loss.detach(), targets, scale)
    return total, sums, count


def native(
    hidden: Tensor,  # (N, C)
    weight: Tensor,  # (V, C)
    targets: Tensor,  # (1, N) int32
    weights: Tensor | None = None,  # (1,)
    form: LossForm = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """torch's own chunked ``F.linear_cross_entropy``: eager mode, one target, empty form."""
    (main,) = targets
    supervised = main >= 0
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


def chunk_rows(hidden: Tensor, weight: Tensor) -> int:
    """Rows of a chunk: on a GPU, N halved until the chunk's logits take at most CHUNK_BYTES.

    Halving keeps all chunks of a power of two alike, so that Inductor compiles one set of kernels.
    """
    if hidden.device.type == "cpu":
        return CPU_ROWS
    positions, row_bytes = hidden.shape[0], weight.shape[0] * hidden.element_size()
    chunks = 1
    while -(-positions // chunks) * row_bytes > CHUNK_BYTES and chunks < positions:
        chunks *= 2
    return max(1, -(-positions // chunks))


class _Chunked(Function):
    """(hidden, weight) -> (total, loss (K, N)), with both gradients made on the way."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        scale: Tensor,
        form: LossForm,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        losses, grads_hidden = [], []
        # In float32: 8 to 32 partial sums in bfloat16 would lose what rare tokens add.
        grad_weight = torch.zeros_like(weight, dtype=_wide(weight.dtype))  # (V, C)
        chunks = zip(hidden.split(rows), ids.split(rows, 1), scale.split(rows, 1), strict=True)
        for h, i, s in chunks:  # (rows, C), (K, rows), (K, rows)
            loss, logits, log_p = _chunk_losses(h, weight, i, form)
            d = _logit_gradient(logits, log_p, i, s, form).to(h.dtype)  # (rows, V)
            losses.append(loss)
            grads_hidden.append(d @ weight)
            grad_weight = _add_product(grad_weight, d, h)
        loss = torch.cat(losses, dim=1)
        ctx.save_for_backward(torch.cat(grads_hidden), grad_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        ctx.mark_non_differentiable(loss)
        return (loss * scale).sum(), loss

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        by = upstream[0]  # () float32: the only differentiable output is the total
        return (
            (grad_hidden * by).to(hidden_dtype),
            (grad_weight * by).to(weight_dtype),
            None,
            None,
            None,
            None,
        )


def _supervision(
    targets: Tensor, weights: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Indices that can be gathered, int64 (K, N), and each loss's weight, 0 where unsupervised."""
    supervised = (targets >= 0).to(dtype)  # (K, N)
    if weights is not None:
        supervised = supervised * (weights if weights.ndim == 2 else weights[:, None])
    return targets.clamp(min=0).long(), supervised


def _chunk_losses(
    h: Tensor, weight: Tensor, ids: Tensor, form: LossForm
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss (K, n), capped logits (n, V) and their log-softmax (n, V), all float32."""
    logits = form.logits(torch, _accumulated(F.linear(h, weight)))
    log_p = F.log_softmax(logits, dim=-1)
    return _losses(logits, log_p, ids, form), logits, log_p


def _losses(logits: Tensor, log_p: Tensor, ids: Tensor, form: LossForm) -> Tensor:
    """(n, V) -> (K, n), unsupervised positions included."""
    mean = log_p.mean(-1) if form.smoothing else None
    lse = logits.logsumexp(-1) if form.z else None
    return form.loss(log_p.gather(1, ids.T).T, mean, lse)


def _logit_gradient(
    logits: Tensor,  # (n, V) float32, capped
    log_p: Tensor,  # (n, V) float32: overwritten
    ids: Tensor,  # (K, n)
    scale: Tensor,  # (K, n)
    form: LossForm,
) -> Tensor:
    """Gradient of the weighted losses with respect to hidden weight^T, (n, V) float32."""
    by_row = scale.sum(0)  # (n,): p's factor, whatever the target
    factor = by_row * (1.0 + 2.0 * form.z * logits.logsumexp(-1)) if form.z else by_row
    d = log_p.exp_() * factor[:, None]
    if form.smoothing:
        d = d - by_row[:, None] * (form.smoothing / logits.shape[-1])
    d = _subtract_at(d, ids, scale * (1.0 - form.smoothing))
    return form.pull_back(logits, d)


def _subtract_at(d: Tensor, ids: Tensor, amounts: Tensor) -> Tensor:
    """d[n, ids[k, n]] -= amounts[k, n]; d (n, V), ids and amounts (K, n)."""
    if not torch.compiler.is_compiling():
        return d.scatter_add_(1, ids.T, -amounts.T)
    # A comparison fuses into the pointwise kernel around it; a scatter would split it in three.
    columns = torch.arange(d.shape[1], device=d.device)
    for column, amount in zip(ids.unbind(0), amounts.unbind(0), strict=True):
        d = d - torch.where(columns == column[:, None], amount[:, None], 0.0)
    return d


def _add_product(total: Tensor, d: Tensor, h: Tensor) -> Tensor:
    """Total (V, C), float32, + d^T h; d (n, V), h (n, C) in the compute dtype."""
    if d.dtype == total.dtype:
        return total.addmm_(d.T, h)
    if d.is_cuda:
        return total + torch.mm(d.T, h, out_dtype=total.dtype)
    if d.dtype == torch.float16:  # a sum over rows may leave float16's range
        return total.addmm_(d.T.to(total.dtype), h.to(total.dtype))
    return total + (d.T @ h)


def _reported(loss: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Total (), sums (K,), count () from every position's loss (K, N)."""
    supervised = targets >= 0
    sums = torch.where(supervised, loss.detach(), 0.0).sum(-1)
    return (loss * scale).sum(), sums, supervised[0].sum(dtype=torch.float32)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _accumulated(x: Tensor) -> Tensor:
    return x.to(_wide(x.dtype))
