"""MARS: AdamW on variance-reduced gradients, corrected by the previous one (arXiv:2411.10438).

    c  = g + gamma beta1 / (1 - beta1) (g - g')          g': the gradient of the previous update
    c <- c min(1, 1 / |c|)                               | |: the parameter's Euclidean norm
    m <- beta1 m + (1 - beta1) c             v <- beta2 v + (1 - beta2) c^2
    p <- p - lr (m^ / (sqrt(v^) + epsilon) + wd p)

This is MARS-AdamW in its approximate form, used for the paper's language models: g' is the gradient of the
previous update, not that of the new weights on the previous batch, so that a step needs no second pass. At
the first update, also of a branch of a run with another rule, g' is g. It is stored as a third number of state
per weight.
"""

from __future__ import annotations

from typing import Any

from minillm_core import Plugin, option, scheduled, stage
from minillm_optim.adaptive import ADAMS_LR, unbiased
from minillm_optim.scope import Scope, in_scope

__all__ = ["MARS", "corrected_adam"]


class MARS(Plugin, api=1):
    """AdamW on gradients corrected by their change since the update before."""

    lr: float = option(
        ADAMS_LR, gt=0, search=(5e-4, 1.5e-3, 5e-3, 1.5e-2), help="peak learning rate"
    )
    gamma: float = option(0.025, ge=0, help="weight of the correction; 0: AdamW")
    beta1: float = option(0.95, ge=0, lt=1, help="decay rate of the mean of corrected gradients")
    beta2: float = option(0.99, ge=0, lt=1, help="decay rate of the mean of their squares")
    epsilon: float = option(1e-8, gt=0, help="constant added to the root of the mean of squares")
    weight_decay: float | None = option(
        None, ge=0, help="decoupled weight decay, times the learning rate; none: train.weight_decay"
    )
    scope: Scope = option("all", help="parameters with this rule: all, hidden (matrices), rest")

    def optimizer_factory(self, optimizer):
        adam = stage(
            corrected_adam,
            state={"m": "like", "v": "like", "last": "like", "begun": "scalar"},
            needs="matrix",  # the norm is per parameter, also within a stack
            gamma=self.gamma,
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=self.epsilon,
        )
        optimizer.rule(
            "mars", lr=scheduled(self.lr), weight_decay=self.weight_decay, precondition=adam
        )
        optimizer.assign("mars", in_scope(self.scope))


def corrected_adam(
    ops: Any,
    update: Any,
    param: Any,
    state: dict[str, Any],
    *,
    gamma: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    updates: Any,
) -> Any:
    """Compute Adam's update of the corrected gradient; update, m, v and ``last``, the one before (N, ...).

    ``begun``, (N, 1, ...), is 0 before the rule's own first update, where ``last`` is not a gradient.
    """
    last = ops.where(state["begun"] > 0, state["last"], update)
    c = update + (update - last) * (gamma * beta1 / (1 - beta1))
    norm = ops.sqrt(ops.sum(ops.square(c), tuple(range(1, c.ndim)), keepdims=True))  # (N, 1, ...)
    c = c / ops.maximum(norm, 1.0)
    m = state["m"] * beta1 + c * (1 - beta1)
    v = state["v"] * beta2 + ops.square(c) * (1 - beta2)
    root = ops.sqrt(unbiased(ops, v, beta2, updates))
    made = unbiased(ops, m, beta1, updates) / (root + epsilon)
    return made, {"m": m, "v": v, "last": update, "begun": ops.ones_like(state["begun"])}
