"""SOAP: AdamW in the eigenbasis of Shampoo's statistics (arXiv:2409.11321).

    m <- beta1 m + (1 - beta1) g
    L <- beta2 L + (1 - beta2) g g^T         R <- beta2 R + (1 - beta2) g^T g
    v <- beta2 v + (1 - beta2) (P^T g Q)^2   P, Q: orthonormal, near the eigenvectors of L and R
    u  = P (m^' / (sqrt(v^) + epsilon)) Q^T  m^' = P^T m^ Q;  m^, v^: divided by 1 - beta^t
    p <- p - lr (u + wd p)

In every ``every``-th update P is the orthonormal factor of (L + damping |L| 1) P, Q likewise: one step of
orthogonal iteration, which Shampoo's roots need thirty for. P and Q begin at 1, where SOAP is AdamW; the
paper begins with the eigenvectors of the first gradient and leaves that update out. The multiple of 1 leaves
eigenvectors as they are, and lets rounding choose none of them, as it would where a statistic has no
eigenvalues to speak of. For the same reason epsilon is 1e-8 and 1e-4 of the largest sqrt(v^) of a matrix.

The hidden matrices follow it; the rest stays with AdamW. State: two numbers a weight, and four square
matrices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minillm_core import Plugin, option, scheduled, stage
from minillm_optim.adaptive import ADAMS_LR, unbiased
from minillm_optim.scope import in_scope
from minillm_optim.shampoo import identity, norm, of_columns, of_rows, statistics

__all__ = ["SOAP", "STATISTICS", "adam_in_eigenbasis", "divided", "followed", "into", "turned"]

EPSILON, RELATIVE = 1e-8, 1e-4
TINY = 1e-30  # of norms

SIDES: Mapping[str, Any] = {"left": of_rows, "right": of_columns}
STATISTICS = {**SIDES, **{f"{side}_basis": shape for side, shape in SIDES.items()}}
"""Entries of a stage's state: L and R, and a basis of each."""


class SOAP(Plugin, api=1):
    """AdamW in the eigenbasis of Shampoo's statistics for the hidden matrices."""

    lr: float = option(
        ADAMS_LR, gt=0, search=(5e-4, 1.5e-3, 5e-3, 1.5e-2), help="peak learning rate"
    )
    beta1: float = option(0.95, ge=0, lt=1, help="of the mean of gradients")
    beta2: float = option(0.95, ge=0, lt=1, help="of the statistics and of squares")
    every: int = option(10, ge=1, help="updates from one turn of the bases to the next")
    damping: float = option(
        1e-3, gt=0, lt=1, help="added to the diagonals, in norms of a statistic"
    )
    weight_decay: float | None = option(
        None, ge=0, help="decoupled, times the learning rate; none: train.weight_decay"
    )

    def optimizer_factory(self, optimizer):
        adam = stage(
            adam_in_eigenbasis,
            state={"m": "like", "v": "like"} | STATISTICS,
            needs="matrix",
            every=self.every,
            beta1=self.beta1,
            beta2=self.beta2,
            damping=self.damping,
        )
        optimizer.rule(
            "soap", lr=scheduled(self.lr), weight_decay=self.weight_decay, precondition=adam
        )
        optimizer.assign("soap", in_scope("hidden"))


def turned(ops: Any, statistic: Any, basis: Any, damping: float) -> Any:
    """Symmetric statistic, basis (N, R, R) -> the basis, nearer to the eigenvectors, largest first."""
    one = identity(ops, statistic)
    damped = statistic + one * (ops.maximum(norm(ops, statistic), TINY) * damping)
    q, r = ops.qr(damped @ basis)
    diagonal = ops.sum(r * one, -2, keepdims=True)  # (N, 1, R): a column's sign is the framework's
    return ops.where(diagonal < 0, -q, q)


def followed(
    ops: Any,
    update: Any,
    state: Mapping[str, Any],
    beta: float,
    damping: float,
    updates: Any,
    due: bool,
) -> tuple[dict[str, Any], Any, Any]:
    """update (N, R, C) -> :data:`STATISTICS` with it, and the bases P (N, R, R), Q (N, C, C), turned where due."""
    left, right = statistics(ops, update, state, beta)
    p, q = (  # state begins at 0, bases at 1
        ops.where(updates > 1, state[f"{side}_basis"], identity(ops, state[f"{side}_basis"]))
        for side in SIDES
    )
    if due:
        p, q = turned(ops, left, p, damping), turned(ops, right, q, damping)
    return {"left": left, "right": right, "left_basis": p, "right_basis": q}, p, q


def into(ops: Any, x: Any, p: Any, q: Any) -> Any:
    """x (N, R, C) -> P^T x Q."""
    return ops.matrix_transpose(p) @ x @ q


def divided(ops: Any, x: Any, root: Any, p: Any, q: Any) -> Any:
    """x and its usual size (N, R, C), both in the bases -> P (x / (root + epsilon)) Q^T."""
    floor = ops.max(ops.max(root, -1, keepdims=True), -2, keepdims=True) * RELATIVE + EPSILON
    return p @ (x / (root + floor)) @ ops.matrix_transpose(q)


def adam_in_eigenbasis(
    ops: Any,
    update: Any,
    param: Any,
    state: dict[str, Any],
    *,
    beta1: float,
    beta2: float,
    damping: float,
    updates: Any,
    due: bool,
) -> Any:
    """update, m, v (N, R, C); left (N, R, R), right (N, C, C), and their bases -> Adam's update, turned back."""
    kept, p, q = followed(ops, update, state, beta2, damping, updates, due)
    m = state["m"] * beta1 + update * (1 - beta1)
    v = state["v"] * beta2 + ops.square(into(ops, update, p, q)) * (1 - beta2)
    root = ops.sqrt(unbiased(ops, v, beta2, updates))
    mean = into(ops, unbiased(ops, m, beta1, updates), p, q)
    return divided(ops, mean, root, p, q), {"m": m, "v": v} | kept
