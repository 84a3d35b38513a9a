"""SOAP: AdamW in the eigenbasis of Shampoo's statistics (arXiv:2409.11321).

    m <- beta1 m + (1 - beta1) g
    L <- beta2 L + (1 - beta2) g g^T         R <- beta2 R + (1 - beta2) g^T g
    v <- beta2 v + (1 - beta2) (P^T g Q)^2   P, Q: orthonormal, near the eigenvectors of L and R
    u  = P (m^' / (sqrt(v^) + epsilon)) Q^T  m^' = P^T m^ Q;  m^, v^: divided by 1 - beta^t
    p <- p - lr (u + wd p)

Every ``every`` updates P is set to the orthonormal factor of (L + damping |L| 1) P, Q likewise: one step of
orthogonal iteration, where Shampoo's roots need thirty. P and Q start at 1, where SOAP equals AdamW, also in a
branch that starts between two changes; the paper starts with the eigenvectors of the first gradient and skips that
update. The added multiple of 1 does not change eigenvectors, and prevents rounding from choosing them where a
statistic's eigenvalues are negligible. For the same reason epsilon is 1e-8 plus 1e-4 of the largest sqrt(v^) of a
matrix.

It applies to the hidden matrices; the others stay with AdamW. State: two numbers per weight, and four square
matrices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minillm_core import Plugin, option, scheduled, stage
from minillm_optim.adaptive import ADAMS_LR, unbiased
from minillm_optim.scope import in_scope
from minillm_optim.shampoo import identity, norm, of_columns, of_rows, or_identity, statistics

__all__ = ["SOAP", "STATISTICS", "adam_in_eigenbasis", "divided", "followed", "into", "turned"]

EPSILON, RELATIVE = 1e-8, 1e-4
TINY = 1e-30  # of norms

SIDES: Mapping[str, Any] = {"left": of_rows, "right": of_columns}
STATISTICS = {**SIDES, **{f"{side}_basis": shape for side, shape in SIDES.items()}}
"""Entries of a stage's state: L and R, and a basis for each."""


class SOAP(Plugin, api=1):
    """AdamW in the eigenbasis of Shampoo's statistics for the hidden matrices."""

    lr: float = option(
        ADAMS_LR, gt=0, search=(5e-4, 1.5e-3, 5e-3, 1.5e-2), help="peak learning rate"
    )
    beta1: float = option(0.95, ge=0, lt=1, help="decay rate of the mean of gradients")
    beta2: float = option(
        0.95, ge=0, lt=1, help="decay rate of the statistics and of the mean of squared gradients"
    )
    every: int = option(10, ge=1, help="updates between two changes of the bases")
    damping: float = option(
        1e-3, gt=0, lt=1, help="multiple of the identity added to a statistic, relative to its norm"
    )
    weight_decay: float | None = option(
        None, ge=0, help="decoupled weight decay, times the learning rate; none: train.weight_decay"
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
    """Turn basis (N, R, R) towards the eigenvectors of a symmetric statistic (N, R, R), largest first."""
    one = identity(ops, statistic)
    damped = statistic + one * (ops.maximum(norm(ops, statistic), TINY) * damping)
    q, r = ops.qr(damped @ basis)
    diagonal = ops.sum(r * one, -2, keepdims=True)  # (N, 1, R): signs differ by framework
    return ops.where(diagonal < 0, -q, q)


def followed(
    ops: Any,
    update: Any,
    state: Mapping[str, Any],
    beta: float,
    damping: float,
    due: bool,
) -> tuple[dict[str, Any], Any, Any]:
    """Update :data:`STATISTICS` with update (N, R, C), and turn the bases P (N, R, R), Q (N, C, C) where due."""
    left, right = statistics(ops, update, state, beta)
    p, q = (or_identity(ops, state[f"{side}_basis"]) for side in SIDES)
    if due:
        p, q = turned(ops, left, p, damping), turned(ops, right, q, damping)
    return {"left": left, "right": right, "left_basis": p, "right_basis": q}, p, q


def into(ops: Any, x: Any, p: Any, q: Any) -> Any:
    """Compute P^T x Q of x (N, R, C)."""
    return ops.matrix_transpose(p) @ x @ q


def divided(ops: Any, x: Any, root: Any, p: Any, q: Any) -> Any:
    """Compute P (x / (root + epsilon)) Q^T of x and its usual magnitude (N, R, C), both in the bases."""
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
    """Compute Adam's update in the bases, and rotate back; m, v (N, R, C); left (N, R, R), right (N, C, C)."""
    kept, p, q = followed(ops, update, state, beta2, damping, due)
    m = state["m"] * beta1 + update * (1 - beta1)
    v = state["v"] * beta2 + ops.square(into(ops, update, p, q)) * (1 - beta2)
    root = ops.sqrt(unbiased(ops, v, beta2, updates))
    mean = into(ops, unbiased(ops, m, beta1, updates), p, q)
    return divided(ops, mean, root, p, q), {"m": m, "v": v} | kept
