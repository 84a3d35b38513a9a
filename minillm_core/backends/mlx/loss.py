"""Linear cross-entropy on MLX: dense, with MLX's fused cross-entropy, and in chunks of rows.

MLX 0.32 has no fused linear cross-entropy: its cross-entropy holds N V logits and N V gradients.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from minillm_core.backends.mlx.arrays import MLXArrays
from minillm_core.ops.form import LossForm

PLAIN = LossForm()
CHUNK_BYTES = 2**28  # largest logits of one chunk, in float32


def dense(
    hidden: mx.array,  # (N, C)
    weight: mx.array,  # (V, C)
    targets: mx.array,  # (K, N) int32
    weights: mx.array | None = None,  # (K,) or (K, N)
    form: LossForm = PLAIN,
) -> tuple[mx.array, mx.array, mx.array]:
    """Compute the loss from all logits at once, in float32: 6 N C V FLOPs with backward, 8 N V bytes and up."""
    ids, scale = _supervision(targets, weights)
    loss, _, _ = _losses(hidden, weight, ids, form)
    return _reported(MLXArrays.sum(loss * scale), loss, targets)


def fused(
    hidden: mx.array,  # (N, C)
    weight: mx.array,  # (V, C)
    targets: mx.array,  # (1, N) int32
    weights: mx.array | None = None,  # (1,) or (1, N)
    form: LossForm = PLAIN,
) -> tuple[mx.array, mx.array, mx.array]:
    """Call mx.fast.cross_entropy on logits in the compute dtype: one target, empty form.

    6 N C V FLOPs; on a GPU 2 N V bytes for bfloat16 logits and as many for their gradient.
    """
    ids, scale = _supervision(targets, weights)
    loss = mx.fast.cross_entropy(hidden @ weight.T, ids[0])[None]  # (1, N) float32
    return _reported(MLXArrays.sum(loss * scale), loss, targets)


def chunked(
    hidden: mx.array,  # (N, C)
    weight: mx.array,  # (V, C)
    targets: mx.array,  # (K, N) int32
    weights: mx.array | None = None,  # (K,) or (K, N)
    form: LossForm = PLAIN,
    *,
    rows: int | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Compute losses and gradients chunk by chunk, both in the forward pass: 6 N C V FLOPs.

    Each chunk depends on the losses and gradients of the one before (``mx.depends``): otherwise MLX
    schedules all products first and holds all logits. Therefore the gradients are computed even if
    only the loss is read: in evaluation that costs 4 N C V more FLOPs, and no memory.

    Args:
        hidden: the hidden states after the last norm.
        weight: the head.
        targets: see the contract.
        weights: see the contract; constants.
        form: see the contract.
        rows: positions per chunk; default: :func:`chunk_rows`.
    """
    rows = rows or chunk_rows(hidden.shape[0], weight.shape[0])
    ids, scale = _supervision(targets, weights)

    def walk(hidden: mx.array, weight: mx.array) -> tuple[mx.array, ...]:
        return _walk(hidden, weight, ids, scale, form, rows)

    total_and_gradients: Any = mx.custom_function(walk)

    @total_and_gradients.vjp
    def pull_back(
        primals: tuple[mx.array, ...],
        cotangents: tuple[mx.array, ...],
        outputs: tuple[mx.array, ...],
    ) -> tuple[mx.array, ...]:
        by, (_, grad_hidden, grad_weight, _) = cotangents[0], outputs
        return (
            (grad_hidden * by).astype(primals[0].dtype),
            (grad_weight * by).astype(primals[1].dtype),
        )

    total, _, _, loss = total_and_gradients(hidden, weight)
    return _reported(total, loss, targets)


def token_losses(
    hidden: mx.array,  # (N, C)
    weight: mx.array,  # (V, C)
    targets: mx.array,  # (N,) int32
    form: LossForm = PLAIN,
) -> mx.array:
    """Compute each position's loss (N,), without gradient, in dependent chunks as in :func:`chunked`."""
    hidden, weight = mx.stop_gradient(hidden), mx.stop_gradient(weight)
    rows, ids = chunk_rows(hidden.shape[0], weight.shape[0]), mx.maximum(targets, 0)[None]
    losses: list[mx.array] = []
    for start in range(0, hidden.shape[0], rows):
        h = hidden[start : start + rows]
        if start:
            (h,) = mx.depends([h], [losses[-1]])
        losses.append(_losses(h, weight, ids[:, start : start + rows], form)[0][0])
    return mx.where(targets >= 0, mx.concatenate(losses), 0.0)


def chunk_rows(positions: int, vocab: int) -> int:
    """Choose the number of rows per chunk: ``positions``, halved until the float32 logits fit CHUNK_BYTES.

    >>> chunk_rows(65_536, 50_304), chunk_rows(2_048, 4_096)
    (1024, 2048)
    """
    chunks = 1
    while -(-positions // chunks) * vocab * 4 > CHUNK_BYTES and chunks < positions:
        chunks *= 2
    return max(1, -(-positions // chunks))


def _walk(
    hidden: mx.array, weight: mx.array, ids: mx.array, scale: mx.array, form: LossForm, rows: int
) -> tuple[mx.array, ...]:
    """Compute total (), gradients (N, C) in hidden's dtype and (V, C) in float32, and losses (K, N)."""
    losses, grads_hidden = [], []
    grad_weight = mx.zeros(weight.shape, mx.float32)
    for start in range(0, hidden.shape[0], rows):
        chunk = slice(start, start + rows)
        h, i, s = hidden[chunk], ids[:, chunk], scale[:, chunk]
        if start:
            (h,) = mx.depends([h], [grads_hidden[-1], grad_weight, losses[-1]])
        loss, logits, log_p = _losses(h, weight, i, form)
        d = _logit_gradient(logits, log_p, i, s, form).astype(h.dtype)  # (rows, V)
        losses.append(loss)
        grads_hidden.append(d @ weight)
        if d.dtype == mx.float16:  # a sum over rows may leave float16's range
            d, h = d.astype(mx.float32), h.astype(mx.float32)
        grad_weight = grad_weight + (d.T @ h).astype(mx.float32)
    loss = mx.concatenate(losses, axis=1)
    return MLXArrays.sum(loss * scale), mx.concatenate(grads_hidden), grad_weight, loss


def _supervision(targets: mx.array, weights: mx.array | None) -> tuple[mx.array, mx.array]:
    """Return valid indices (K, N), and the weight of each loss, 0 where unsupervised, (K, N)."""
    supervised = (targets >= 0).astype(mx.float32)
    if weights is not None:
        supervised = supervised * (weights if weights.ndim == 2 else weights[:, None])
    return mx.maximum(targets, 0), mx.stop_gradient(supervised)


def _losses(
    h: mx.array, weight: mx.array, ids: mx.array, form: LossForm
) -> tuple[mx.array, mx.array, mx.array]:
    """Compute loss (K, n), capped logits (n, V) and their log-softmax (n, V), all float32."""
    logits = form.logits(mx, (h @ weight.T).astype(mx.float32))
    lse = MLXArrays.logsumexp(logits)  # (n,)
    log_p = logits - lse[:, None]
    mean = MLXArrays.mean(log_p, -1) if form.smoothing else None
    picked = mx.take_along_axis(log_p, ids.T, axis=1).T  # (K, n)
    return form.loss(picked, mean, lse), logits, log_p


def _logit_gradient(
    logits: mx.array,  # (n, V) float32, capped
    log_p: mx.array,  # (n, V) float32
    ids: mx.array,  # (K, n)
    scale: mx.array,  # (K, n)
    form: LossForm,
) -> mx.array:
    """Compute the gradient of the weighted losses with respect to hidden weight^T, (n, V) float32."""
    vocab = logits.shape[-1]
    by_row = scale.sum(0)  # (n,): the factor of p, summed over targets
    factor = by_row
    if form.z:
        factor = by_row * (1.0 + 2.0 * form.z * (logits[:, 0] - log_p[:, 0]))  # their lse
    d = mx.exp(log_p) * factor[:, None]
    if form.smoothing:
        d = d - by_row[:, None] * (form.smoothing / vocab)
    columns = mx.arange(vocab)  # a comparison fuses with the lines above, a scatter would not
    for k in range(ids.shape[0]):
        amount = scale[k] * (1.0 - form.smoothing)
        d = d - mx.where(columns == ids[k][:, None], amount[:, None], 0.0)
    return form.pull_back(logits, d)


def _reported(
    total: mx.array, loss: mx.array, targets: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """Return total (), sums (K,) and count () from each position's loss (K, N)."""
    supervised = targets >= 0
    sums = MLXArrays.sum(mx.where(supervised, mx.stop_gradient(loss), 0.0), -1)
    return total, sums, supervised[0].sum().astype(mx.float32)
