"""Cautious AdamW: weights whose update opposes their gradient do not move (C-AdamW, arXiv:2411.16085).

    m <- beta1 m + (1 - beta1) g             v <- beta2 v + (1 - beta2) g^2
    u  = m^ / (sqrt(v^) + epsilon)           m^, v^: divided by 1 - beta^t
    a  = [u g > 0]
    p <- p - lr (u a / max(mean(a), 0.001) + wd p)

mean(a) is over the parameter: the remaining elements grow by the fraction that is masked. The paper's
Algorithm 2 divides by (sum(a) + 1) / n; this is its published code.
"""

from __future__ import annotations

from typing import Any

from minillm_core import Plugin, option, scheduled, stage
from minillm_optim.adaptive import ADAMS_LR, unbiased
from minillm_optim.scope import Scope, in_scope

__all__ = ["CautiousAdam", "cautious_adam"]

LEAST = 1e-3  # minimum fraction of weights that move


class CautiousAdam(Plugin, api=1):
    """AdamW in which weights move only where update and gradient agree in sign."""

    lr: float = option(
        ADAMS_LR, gt=0, search=(5e-4, 1.5e-3, 5e-3, 1.5e-2), help="peak learning rate"
    )
    beta1: float = option(0.9, ge=0, lt=1, help="decay rate of the mean of gradients")
    beta2: float = option(0.95, ge=0, lt=1, help="decay rate of the mean of squared gradients")
    epsilon: float = option(1e-8, gt=0, help="constant added to the root of the mean of squares")
    weight_decay: float | None = option(
        None, ge=0, help="decoupled weight decay, times the learning rate; none: train.weight_decay"
    )
    scope: Scope = option("all", help="parameters with this rule: all, hidden (matrices), rest")

    def optimizer_factory(self, optimizer):
        adam = stage(
            cautious_adam,
            state={"m": "like", "v": "like"},
            needs="matrix",  # the fraction is per parameter, also within a stack
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=self.epsilon,
        )
        optimizer.rule(
            "cautious_adam",
            lr=scheduled(self.lr),
            weight_decay=self.weight_decay,
            precondition=adam,
        )
        optimizer.assign("cautious_adam", in_scope(self.scope))


def cautious_adam(
    ops: Any,
    update: Any,
    param: Any,
    state: dict[str, Any],
    *,
    beta1: float,
    beta2: float,
    epsilon: float,
    updates: Any,
) -> Any:
    """Compute Adam's update (N, ...), 0 where its sign differs from the gradient's; and m and v."""
    m = state["m"] * beta1 + update * (1 - beta1)
    v = state["v"] * beta2 + ops.square(update) * (1 - beta2)
    root = ops.sqrt(unbiased(ops, v, beta2, updates))
    made = unbiased(ops, m, beta1, updates) / (root + epsilon)
    one = ops.ones_like(made)
    agree = ops.where(made * update > 0, one, one * 0.0)
    share = ops.mean(agree, tuple(range(1, agree.ndim)), keepdims=True)  # (N, 1, ...)
    return made * agree / ops.maximum(share, LEAST), {"m": m, "v": v}
