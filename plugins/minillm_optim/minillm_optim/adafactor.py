"""Adafactor: second moments of a matrix as an outer product of two vectors (arXiv:1804.04235).

    s  = g^2 + 1e-30                                 b(t) = 1 - t^-0.8
    R <- b R + (1 - b) mean of s over columns        (rows, 1)
    C <- b C + (1 - b) mean of s over rows           (1, columns)
    u  = g / sqrt(R C / mean(R))                     of a vector: V <- b V + (1 - b) s,  u = g / sqrt(V)
    u <- u / max(1, rms(u) / clipping)               rms: of the whole parameter
    p <- p - lr (a u + wd p)

The optimizer state has rows + columns numbers instead of two per weight. The paper's step is relative to the
weights, a = max(0.001, rms(p)) and lr about 0.01; with ``relative=false`` a is 1, and lr about AdamW's. There is
no first moment, as in the paper's own runs.
"""

from __future__ import annotations

from typing import Any

from minillm_core import Plugin, option, scheduled, stage
from minillm_optim.scope import Scope, in_scope

__all__ = ["Adafactor", "factored"]

SQUARE = 1e-30  # added to squares: the paper's epsilon1
LEAST = 1e-3  # minimum scale of weights: its epsilon2


class Adafactor(Plugin, api=1):
    """Second moments factored by rows and columns: little state, steps relative to the weights' size."""

    lr: float = option(
        0.01,
        gt=0,
        search=(3e-3, 0.01, 0.03),
        help="peak learning rate; with relative, as a fraction of the weights' RMS",
    )
    relative: bool = option(
        True, help="multiply steps by the root mean square (RMS) of the weights"
    )
    decay: float = option(
        0.8, gt=0, le=1, help="exponent of the second moment's decay rate at update t, 1 - t^-decay"
    )
    clipping: float = option(1.0, gt=0, help="maximum root mean square of an update")
    weight_decay: float | None = option(
        None, ge=0, help="decoupled weight decay, times the learning rate; none: train.weight_decay"
    )
    scope: Scope = option("all", help="parameters with this rule: all, hidden (matrices), rest")

    def optimizer_factory(self, optimizer):
        stages = {
            "precondition": stage(
                factored,
                state={"rows": over_columns, "columns": over_rows},
                needs="matrix",
                decay=self.decay,
                clipping=self.clipping,
            )
        }
        if self.relative:
            stages["scale"] = stage(relative, needs="matrix")
        optimizer.rule("adafactor", lr=scheduled(self.lr), weight_decay=self.weight_decay, **stages)
        optimizer.assign("adafactor", in_scope(self.scope))


def over_columns(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return one entry per row of a matrix, (R, 1); of a vector, one per weight."""
    return (*shape[:-1], 1) if len(shape) > 1 else shape


def over_rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return one entry per column of a matrix, (1, C); of a vector, a single one, which stays 0."""
    return (*shape[:-2], 1, shape[-1]) if len(shape) > 1 else (1,)


def rms(ops: Any, x: Any) -> Any:
    """Compute the root mean square of x (N, ...), (N, 1, ...)."""
    return ops.sqrt(ops.mean(ops.square(x), tuple(range(1, x.ndim)), keepdims=True))


def factored(
    ops: Any,
    update: Any,
    param: Any,
    state: dict[str, Any],
    *,
    decay: float,
    clipping: float,
    updates: Any,
) -> Any:
    """Divide update (N, R, C) or (N, C) by the root of its second moments, and clip it."""
    kept = 1.0 - ops.exp(ops.log(updates) * -decay)  # b(t), 0 at the first update
    squares = ops.square(update) + SQUARE
    rows, columns = state["rows"], state["columns"]
    if update.ndim > 2:
        rows = rows * kept + ops.mean(squares, -1, keepdims=True) * (1.0 - kept)
        columns = columns * kept + ops.mean(squares, -2, keepdims=True) * (1.0 - kept)
        root = ops.sqrt(rows / ops.mean(rows, -2, keepdims=True)) * ops.sqrt(columns)
    else:
        rows = rows * kept + squares * (1.0 - kept)
        root = ops.sqrt(rows)
    made = update / root
    made = made / ops.maximum(rms(ops, made) / clipping, 1.0)
    return made, {"rows": rows, "columns": columns}


def relative(ops: Any, update: Any, param: Any, state: dict[str, Any]) -> Any:
    """Scale the update by the RMS of the parameter; update and param (N, ...)."""
    return update * ops.maximum(rms(ops, param), LEAST), state
