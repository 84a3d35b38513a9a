"""GaLore: AdamW's moments are those of a low-rank projection of the gradient (arXiv:2403.03507).

    r = P^T g                                       g (R, C), R <= C, P (R, rank), r (rank, C); a tall g is transposed
    m <- beta1 m + (1 - beta1) r                    v <- beta2 v + (1 - beta2) r^2
    u  = scale P (m^ / (sqrt(v^) + epsilon))        m^, v^: divided by 1 - beta^t, t the updates of this rule
    p <- p - lr (u + wd p)

Every ``every`` updates P is set to orthonormal columns near the largest left singular vectors of that g: by
orthogonal iteration, P <- the orthonormal factor of (g g^T + damping |g|^2 1) P, ``iterations`` times, from the
previous P, or the first columns of 1 at the start; the paper computes the SVD. Moments are unchanged when P
changes, as in the paper. If the first step is skipped, P is the first columns of 1 until it is next set. Epsilon
is 1e-8 plus 1e-4 of the largest sqrt(v^) of a matrix, so that directions missing in a gradient of lower rank do
not move.

It applies to the hidden matrices; the others stay with AdamW. State: 2 rank (R + C) - R rank numbers per matrix,
instead of AdamW's 2 R C. At full rank P is a rotation of the whole space, and nothing is projected out.
"""

from __future__ import annotations

from typing import Any

from minillm_core import Plugin, option, scheduled, stage
from minillm_optim.adaptive import ADAMS_LR, unbiased
from minillm_optim.scope import in_scope
from minillm_optim.soap import EPSILON, RELATIVE, TINY

__all__ = ["GaLore", "adam_of_projection", "turned_to"]


class GaLore(Plugin, api=1):
    """AdamW on a low-rank projection of the hidden matrices' gradients, moments included."""

    lr: float = option(
        ADAMS_LR, gt=0, search=(5e-4, 1.5e-3, 5e-3, 1.5e-2), help="peak learning rate"
    )
    rank: int = option(
        128, ge=1, help="rank of the projection; at most the smaller side of a matrix"
    )
    every: int = option(200, ge=1, help="updates between two projections")
    scale: float = option(0.25, gt=0, help="factor on the update (the paper's alpha)")
    iterations: int = option(
        2, ge=1, le=100, help="number of orthogonal iterations at each new projection"
    )
    damping: float = option(
        1e-3,
        gt=0,
        lt=1,
        help="multiple of the identity added to g g^T, relative to the squared norm of g",
    )
    beta1: float = option(0.9, ge=0, lt=1, help="decay rate of the mean of gradients")
    beta2: float = option(0.999, ge=0, lt=1, help="decay rate of the mean of squared gradients")
    weight_decay: float | None = option(
        None, ge=0, help="decoupled weight decay, times the learning rate; none: train.weight_decay"
    )

    def optimizer_factory(self, optimizer):
        adam = stage(
            adam_of_projection,
            state={"mean": of_moments, "square": of_moments, "basis": of_basis, "count": "scalar"},
            needs="matrix",
            every=self.every,
            rank=self.rank,
            scale=self.scale,
            iterations=self.iterations,
            damping=self.damping,
            beta1=self.beta1,
            beta2=self.beta2,
        )
        optimizer.rule(
            "galore", lr=scheduled(self.lr), weight_decay=self.weight_decay, precondition=adam
        )
        optimizer.assign("galore", in_scope("hidden"))


def of_basis(shape: tuple[int, int], rank: int) -> tuple[int, int]:
    """Return the shape of P: the smaller side, rank."""
    return min(shape), min(rank, *shape)


def of_moments(shape: tuple[int, int], rank: int) -> tuple[int, int]:
    """Return the shape of a projected gradient: rank, the larger side."""
    return min(rank, *shape), max(shape)


def turned_to(ops: Any, g: Any, basis: Any, *, iterations: int, damping: float) -> Any:
    """Turn basis (N, R, rank) towards the largest left singular vectors of g (N, R, C), R <= C; orthonormal."""
    size = ops.maximum(ops.sum(ops.square(g), (-2, -1), keepdims=True), TINY)
    for _ in range(iterations):
        damped = g @ (ops.matrix_transpose(g) @ basis) + basis * (size * damping)
        q, r = ops.qr(damped / size)
        diagonal = ops.sum(r * eye(ops, *r.shape[-2:]), -2, keepdims=True)  # (N, 1, rank)
        basis = ops.where(diagonal < 0, -q, q)  # frameworks differ in a column's sign
    return basis


def eye(ops: Any, rows: int, columns: int) -> Any:
    """Return the first rows and columns of the identity, (1, rows, columns)."""
    same = ops.expand_dims(ops.arange(rows), 1) == ops.expand_dims(ops.arange(columns), 0)
    return ops.expand_dims(ops.astype(same, "float32"), 0)


def adam_of_projection(
    ops: Any,
    update: Any,
    param: Any,
    state: dict[str, Any],
    *,
    rank: int,
    scale: float,
    iterations: int,
    damping: float,
    beta1: float,
    beta2: float,
    due: bool,
) -> Any:
    """Compute Adam's update of rank ``rank`` (N, R, C); mean, square (N, rank, C), basis (N, R, rank) if R <= C."""
    tall = update.shape[-2] > update.shape[-1]
    g = ops.matrix_transpose(update) if tall else update
    size = ops.sum(ops.square(state["basis"]), (-2, -1), keepdims=True)  # state is initialised to 0
    basis = ops.where(size > 0, state["basis"], eye(ops, *state["basis"].shape[-2:]))
    if due:
        basis = turned_to(ops, g, basis, iterations=iterations, damping=damping)
    low = ops.matrix_transpose(basis) @ g
    mean = state["mean"] * beta1 + low * (1 - beta1)
    square = state["square"] * beta2 + ops.square(low) * (1 - beta2)
    count = state["count"] + 1.0
    root = ops.sqrt(unbiased(ops, square, beta2, count))
    floor = ops.max(ops.max(root, -1, keepdims=True), -2, keepdims=True) * RELATIVE + EPSILON
    made = basis @ (unbiased(ops, mean, beta1, count) / (root + floor)) * scale
    kept = {"mean": mean, "square": square, "basis": basis, "count": count}
    return (ops.matrix_transpose(made) if tall else made), kept
