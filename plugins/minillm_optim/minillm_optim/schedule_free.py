"""Schedule-free AdamW: no learning-rate decay, as an average of the iterates is evaluated (arXiv:2405.15682).

    z: the plain iterates,    x: an average of the z,    y: between them, where gradients are taken

    y_t     = (1 - beta1) z_t + beta1 x_t                  the trained parameter
    v_t     = beta2 v_(t-1) + (1 - beta2) g(y_t)^2
    u_t     = g(y_t) / (sqrt(v_t / (1 - beta2^t)) + epsilon) + wd y_t
    z_(t+1) = z_t - lr_t u_t
    x_(t+1) = (1 - c_t) x_t + c_t z_(t+1)                  c_t = w_t / (w_1 + ... + w_t)
    w_t     = max(lr_1 ... lr_t)^2

beta1 replaces a momentum; 0 averages AdamW's iterates without one. Stored are y, as the parameter, x and v: the
memory of AdamW. x is used for evaluation, sampling and export. With d_t = z_t - x_t = (y_t - x_t) / (1 - beta1)

    x_(t+1) = x_t + c_t (d_t - lr_t u_t)
    y_(t+1) = y_t + beta1 c_t d_t - lr_t (1 - beta1 (1 - c_t)) u_t

so that a parameter may have a beta1 of its own (``role_lr.betas``, ``value_embeds.betas``). The learning rate
rises over the run's warm-up (train.warmup) and stays constant: its cooldown (train.schedule) is ignored, which a
note says. A run need not know its length, and can be evaluated at any step as if the rate had decayed there.
The authors advise rates of 1 to 10 times AdamW's, and beta1 of 0.95 to 0.98 for long runs. A parameter whose
learning rate is 0 (``freeze``) is unchanged, and so is its average. A stage that moves the parameter after the
write (``snoo``, ``ema_nesterov``) is refused: x would refer to its former place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minillm_core import Plugin, option, piecewise, stage
from minillm_optim.adaptive import unbiased
from minillm_optim.scope import Scope, in_scope
from minillm_optim.snoo import unless_still

TINY = 1e-37  # of a sum of squared rates, which is 0 while the rate is


class ScheduleFree(Plugin, api=1):
    """Schedule-free AdamW: a constant rate, evaluated at a running average of the weights."""

    lr: float = option(
        3e-3,
        gt=0,
        search=(1e-3, 3e-3, 0.01),
        help="learning rate, constant after the run's warm-up",
    )
    beta1: float = option(
        0.9, ge=0, lt=1, help="weight of the average x in the point y where gradients are taken"
    )
    beta2: float = option(0.95, ge=0, lt=1, help="decay rate of the mean of squared gradients")
    epsilon: float = option(1e-8, gt=0, help="constant added to the root of the mean of squares")
    weight_decay: float | None = option(
        None,
        ge=0,
        help="decoupled weight decay at y, times the learning rate; none: train.weight_decay",
    )
    scope: Scope = option("all", help="parameters with this rule: all, hidden (matrices), rest")

    def optimizer_factory(self, optimizer):
        warmup = optimizer.warmup
        rising = piecewise((0.0, 0.0), (warmup, self.lr)) if warmup else piecewise((0.0, self.lr))
        where = in_scope(self.scope)
        optimizer.rule(
            "schedule_free",
            lr=rising,
            weight_decay=self.weight_decay,
            precondition=stage(
                precondition,
                state={"square": "like", "count": "scalar"},
                beta2=self.beta2,
                epsilon=self.epsilon,
            ),
            write=stage(
                write,
                state={"x": "like", "weight": "scalar", "peak": "scalar"},
                lr=rising,
                beta1=self.beta1,
            ),
        )
        optimizer.assign("schedule_free", where)
        optimizer.view(where, evaluated)
        optimizer.note("its rate stays constant after the warm-up, whatever train.schedule says")


def precondition(
    ops: Any,
    update: Any,
    param: Any,
    state: dict[str, Any],
    *,
    beta2: float,
    epsilon: float,
) -> tuple[Any, dict[str, Any]]:
    """Divide the gradient by the root of its second moment, with bias correction by the rule's own updates."""
    square, count = state["square"] * beta2 + ops.square(update) * (1 - beta2), state["count"] + 1.0
    root = ops.sqrt(unbiased(ops, square, beta2, count))
    return update / (root + epsilon), {"square": square, "count": count}


def write(
    ops: Any,
    update: Any,
    param: Any,
    state: dict[str, Any],
    *,
    lr: Any,
    lr_mul: Any,
    beta1: float,
) -> tuple[Any, dict[str, Any]]:
    """Move y, the parameter, and x; ``weight``, the sum of the w_t, and ``peak`` are (N, 1, ...)."""
    x = ops.where(state["weight"] > 0, state["x"], param)
    peak = ops.maximum(state["peak"], lr)
    weight = state["weight"] + ops.square(peak)
    share, step = ops.square(peak) / ops.maximum(weight, TINY), update * (lr * lr_mul)
    apart = (param - x) / (1 - beta1)
    moved = param + apart * (share * beta1) - step * (1 - beta1 * (1 - share))
    moved = unless_still(ops, moved, param, lr_mul)
    x = unless_still(ops, x + share * (apart - step), state["x"], lr_mul)
    weight = unless_still(ops, weight, state["weight"], lr_mul)
    return moved, {"x": x, "weight": weight, "peak": peak}


def evaluated(ops: Any, param: Any, state: Mapping[str, Any]) -> Any:
    """Return x; the parameter if there was no step yet."""
    return ops.where(state["write.weight"] > 0, state["write.x"], param)
