"""Linear cross-entropy in chained chunks, each with one kernel between its three matrix products.

Only the kernel reads a chunk's logits; it returns their losses and, in the compute dtype, their
gradient: 4 n V bytes per chunk in bfloat16 where float32 temporaries take three times as many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from minillm_core import LossForm, SigmoidCap, TanhCap
from minillm_metal.kernel import Kernel

__all__ = ["ROWS", "chunk_rows", "linear_cross_entropy"]

PLAIN = LossForm()
CHUNK_BYTES = 2**28  # of a chunk's logits and their gradient together

ROWS = Kernel(
    "loss_rows",
    inputs=("product", "targets", "weights", "sizes", "numbers"),
    outputs=("losses", "gradient"),
    headers=("reduce", "form"),
)


def linear_cross_entropy(
    hidden: mx.array,  # (N, C)
    weight: mx.array,  # (V, C)
    targets: mx.array,  # (K, N) int32
    weights: mx.array | None = None,  # (K,) or (K, N)
    form: LossForm = PLAIN,
    *,
    rows: int | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Return (total, sums (K,), count): see minillm's contract of the op.

    6 N C V FLOPs, including the gradients, which are computed in the forward pass, in evaluations
    as well. Memory besides the results: a chunk's logits and their gradient, and the weight's gradient
    in float32. Each chunk depends on the previous one (``mx.depends``), as MLX would otherwise hold all of them.

    Args:
        hidden: the stream after its last norm.
        weight: the head.
        targets: see the contract.
        weights: see the contract; constants.
        form: see the contract.
        rows: positions per chunk; default: :func:`chunk_rows`.
    """
    rows = rows or chunk_rows(hidden.shape[0], weight.shape[0], hidden.dtype.size)
    amounts = mx.ones(targets.shape, mx.float32)
    if weights is not None:
        amounts = amounts * (weights if weights.ndim == 2 else weights[:, None])
    amounts = mx.stop_gradient(amounts)  # (K, N)

    def walk(hidden: mx.array, weight: mx.array) -> tuple[mx.array, ...]:
        return _walk(hidden, weight, targets, amounts, form, rows)

    losses_and_gradients: Any = mx.custom_function(walk)

    @losses_and_gradients.vjp
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

    total, _, _, losses = losses_and_gradients(hidden, weight)
    sums = mx.stop_gradient(losses).sum(-1)
    return total, sums, (targets[0] >= 0).sum().astype(mx.float32)


def chunk_rows(positions: int, vocab: int, itemsize: int) -> int:
    """Choose the rows of a chunk: halved until logits and gradient fit CHUNK_BYTES.

    >>> chunk_rows(65_536, 50_304, 2), chunk_rows(2_048, 4_096, 4)
    (1024, 2048)
    """
    chunks = 1
    while -(-positions // chunks) * vocab * itemsize * 2 > CHUNK_BYTES and chunks < positions:
        chunks *= 2
    return max(1, -(-positions // chunks))


def loss_rows(
    product: mx.array,  # (n, V)
    targets: mx.array,  # (K, n) int32
    weights: mx.array,  # (K, n) float32
    form: LossForm,
) -> list[mx.array]:
    """Compute losses float32 (K, n), and their weighted sum's gradient (n, V) in the product's dtype."""
    n, vocab = product.shape
    kind, cap = CAPS[type(form.cap)](form.cap)
    numbers = (form.scale, *cap, form.smoothing, form.z)
    return ROWS.launch(
        [product, targets, weights, mx.array([n, vocab], mx.int32), mx.array(numbers, mx.float32)],
        [(targets.shape, mx.float32), (product.shape, product.dtype)],
        template=[("T", product.dtype), ("K", targets.shape[0]), ("CAP", kind)],
        threadgroups=(n, 1, 1),
        threads=512 if vocab >= 16_384 else 128,
    )


CAPS: dict[type, Callable[[Any], tuple[int, tuple[float, float, float]]]] = {
    type(None): lambda cap: (0, (0.0, 0.0, 0.0)),
    TanhCap: lambda cap: (1, (cap.cap, 0.0, 0.0)),
    SigmoidCap: lambda cap: (2, (cap.a, cap.b, cap.c)),
}
"""Class of a cap -> its number in the kernel, and its constants."""


def _walk(
    hidden: mx.array,
    weight: mx.array,
    targets: mx.array,
    amounts: mx.array,
    form: LossForm,
    rows: int,
) -> tuple[mx.array, ...]:
    """Return total (), gradients (N, C) in hidden's dtype and (V, C) in float32, losses (K, N)."""
    losses, grads_hidden = [], []
    grad_weight = mx.zeros(weight.shape, mx.float32)
    for start in range(0, hidden.shape[0], rows):
        chunk = slice(start, start + rows)
        h = hidden[chunk]
        if start:
            (h,) = mx.depends([h], [grads_hidden[-1], grad_weight, losses[-1]])
        loss, d = loss_rows(h @ weight.T, targets[:, chunk], amounts[:, chunk], form)
        losses.append(loss)
        grads_hidden.append(d @ weight)
        if d.dtype == mx.float16:  # a sum over rows may exceed float16's range
            d, h = d.astype(mx.float32), h.astype(mx.float32)
        grad_weight = grad_weight + (d.T @ h).astype(mx.float32)
    loss = mx.concatenate(losses, axis=1)
    return (loss * amounts).sum(-1).sum(), mx.concatenate(grads_hidden), grad_weight, loss
