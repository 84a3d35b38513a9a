"""Shampoo: gradients preconditioned by inverse roots of row and column statistics (arXiv:1802.09568).

    L <- beta2 L + (1 - beta2) g g^T         R <- beta2 R + (1 - beta2) g^T g
    m <- beta1 m + (1 - beta1) g             v <- beta2 v + (1 - beta2) g^2
    u  = L^(-1/4) m R^(-1/4)
    p <- p - lr (|a| / |u| u + wd p)         a = m^ / (sqrt(v^) + 1e-8), AdamW's update

Statistics are running means and the magnitude of a step is AdamW's, as in distributed Shampoo (arXiv:2309.06497,
there called grafting), so that ``shampoo.lr`` has AdamW's scale. The roots are computed every ``every`` updates,
by a coupled Newton iteration with products only (arXiv:2002.09018, from Iannazzo, 2006), for p = 4:

    A = L + damping |L| 1,  M = A (1 + p) / (2 |A|),  H = ((1 + p) / (2 |A|))^(1/p) 1
    T = ((p + 1) 1 - M) / p,  M <- T^p M,  H <- H T              M converges to 1, H to A^(-1/p)

It needs no eigendecomposition, which not all frameworks support on all devices. An iteration raises the
smallest eigenvalue of M by (1 + 1/p)^p = 2.44: 20 of them suffice for damping of 1e-5, 25 for 1e-6, where
float32 rounding is 2e-3 of a root. All iterations are one graph, which torch compiles for minutes. A statistic is
divided by its largest entry before, so that no square leaves float32's range; the root of 0 is 1.

It applies to the hidden matrices; the others stay with AdamW. Between two roots a step costs four products per
matrix; if the first step is skipped, the roots are 1 until they are next computed. State: two numbers per weight,
and four square matrices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minillm_core import Plugin, option, scheduled, stage
from minillm_optim.adaptive import ADAMS_LR, unbiased
from minillm_optim.scope import in_scope

__all__ = ["Shampoo", "inverse_root", "precondition"]

POWER = 4
"""Exponent of the inverse roots of a matrix's two statistics."""

EPSILON = 1e-8  # AdamW's
TINY = 1e-30  # of norms and of a statistic: a matrix that never had a gradient is unchanged


class Shampoo(Plugin, api=1):
    """Inverse fourth roots of row and column statistics for the hidden matrices, in steps of AdamW's size."""

    lr: float = option(
        ADAMS_LR, gt=0, search=(5e-4, 1.5e-3, 5e-3, 1.5e-2), help="peak learning rate"
    )
    beta1: float = option(0.9, ge=0, lt=1, help="decay rate of the mean of gradients")
    beta2: float = option(
        0.95, ge=0, lt=1, help="decay rate of the statistics and of the mean of squared gradients"
    )
    every: int = option(10, ge=1, help="updates between two computations of the roots")
    damping: float = option(
        1e-5, gt=0, lt=1, help="multiple of the identity added to a statistic, relative to its norm"
    )
    iterations: int = option(20, ge=1, le=100, help="number of Newton iterations per root")
    weight_decay: float | None = option(
        None, ge=0, help="decoupled weight decay, times the learning rate; none: train.weight_decay"
    )

    def optimizer_factory(self, optimizer):
        shapes = {"left": of_rows, "right": of_columns}
        roots = {f"{side}_root": shape for side, shape in shapes.items()}
        between = stage(
            precondition,
            state={"m": "like", "v": "like"} | shapes | roots,
            needs="matrix",
            every=self.every,
            beta1=self.beta1,
            beta2=self.beta2,
            damping=self.damping,
            iterations=self.iterations,
        )
        optimizer.rule(
            "shampoo",
            lr=scheduled(self.lr),
            weight_decay=self.weight_decay,
            precondition=between,
        )
        optimizer.assign("shampoo", in_scope("hidden"))


def of_rows(shape: tuple[int, int]) -> tuple[int, int]:
    """Return (R, R) for (R, C)."""
    return shape[0], shape[0]


def of_columns(shape: tuple[int, int]) -> tuple[int, int]:
    """Return (C, C) for (R, C)."""
    return shape[1], shape[1]


def statistics(ops: Any, update: Any, state: Mapping[str, Any], beta2: float) -> tuple[Any, Any]:
    """Update the running means of g g^T (N, R, R) and g^T g (N, C, C) with g (N, R, C)."""
    turned = ops.matrix_transpose(update)
    left = state["left"] * beta2 + (update @ turned) * (1 - beta2)
    right = state["right"] * beta2 + (turned @ update) * (1 - beta2)
    return left, right


def norm(ops: Any, x: Any) -> Any:
    """Compute the Frobenius norm of x (N, R, C), (N, 1, 1)."""
    return ops.sqrt(ops.sum(ops.square(x), (-2, -1), keepdims=True))


def identity(ops: Any, x: Any) -> Any:
    """Return the identity (1, R, R) for x (N, R, R)."""
    place = ops.arange(x.shape[-1])
    same = ops.expand_dims(place, 0) == ops.expand_dims(place, 1)
    return ops.expand_dims(ops.astype(same, "float32"), 0)


def or_identity(ops: Any, x: Any) -> Any:
    """Return x (N, R, R), or the identity where it is 0, as state is initialised."""
    return ops.where(norm(ops, x) > 0, x, identity(ops, x))


def inverse_root(ops: Any, x: Any, *, damping: float, iterations: int) -> Any:
    """Compute (x + damping |x| 1)^(-1/4) of symmetric positive semidefinite x (N, R, R); of 0, 1."""
    one = identity(ops, x)
    largest = ops.max(ops.max(x, -1, keepdims=True), -2, keepdims=True)  # on the diagonal
    size = ops.where(largest > TINY, largest, 1.0)
    x = ops.where(largest > TINY, x / size, one)
    damped = x + one * (norm(ops, x) * damping)
    scale = (1.0 + POWER) / (2.0 * norm(ops, damped))  # (N, 1, 1)
    m, root = damped * scale, one * ops.sqrt(ops.sqrt(scale))
    for _ in range(iterations):
        step = (one * (POWER + 1.0) - m) * (1.0 / POWER)
        square = step @ step
        m, root = square @ square @ m, root @ step
    return root / ops.sqrt(ops.sqrt(size))


def precondition(
    ops: Any,
    update: Any,
    param: Any,
    state: dict[str, Any],
    *,
    beta1: float,
    beta2: float,
    damping: float,
    iterations: int,
    updates: Any,
    due: bool,
) -> Any:
    """Compute an update with Adam's norm; update, m, v (N, R, C); left (N, R, R), right (N, C, C), roots."""
    left, right = statistics(ops, update, state, beta2)
    if due:
        how = {"damping": damping, "iterations": iterations}
        left_root, right_root = (inverse_root(ops, one, **how) for one in (left, right))
    else:  # state is initialised to 0
        kept = state["left_root"], state["right_root"]
        left_root, right_root = (or_identity(ops, one) for one in kept)
    m = state["m"] * beta1 + update * (1 - beta1)
    v = state["v"] * beta2 + ops.square(update) * (1 - beta2)
    root = ops.sqrt(unbiased(ops, v, beta2, updates))
    size = norm(ops, unbiased(ops, m, beta1, updates) / (root + EPSILON))
    made = left_root @ m @ right_root
    made = made * (size / ops.maximum(norm(ops, made), TINY))
    new = {"m": m, "v": v, "left": left, "right": right}
    return made, new | {"left_root": left_root, "right_root": right_root}
