"""Lion: the sign of an interpolated momentum (arXiv:2302.06675, found by program search).

    u <- sign(b1 m + (1 - b1) g)
    p <- p - lr (u + wd p)
    m <- b2 m + (1 - b2) g

Each weight moves by the learning rate, whatever the magnitude of its gradient: the rate is a third to a
tenth of AdamW's, the decay larger by the same factor. One moment instead of two.
"""

from __future__ import annotations

from typing import Any

from minillm_core import Plugin, option, scheduled, stage
from minillm_optim.scope import Scope, in_scope


class Lion(Plugin, api=1):
    """Sign of a momentum: one moment per weight, and every step as long as the learning rate."""

    lr: float = option(
        3e-4,
        gt=0,
        search=(1e-4, 3e-4, 1e-3, 3e-3),
        help="peak learning rate: the distance that each weight moves",
    )
    beta1: float = option(0.9, ge=0, lt=1, help="weight of the momentum in the update's sign")
    beta2: float = option(0.99, ge=0, lt=1, help="decay rate of the momentum")
    weight_decay: float | None = option(
        None, ge=0, help="decoupled weight decay, times the learning rate; none: train.weight_decay"
    )
    scope: Scope = option("all", help="parameters with this rule: all, hidden (matrices), rest")

    def optimizer_factory(self, optimizer):
        optimizer.rule(
            "lion",
            lr=scheduled(self.lr),
            weight_decay=self.weight_decay,
            # not beta1 and beta2: betas that a plugin sets for a parameter are Adam's
            momentum=stage(lion, state={"momentum": "like"}, mixed=self.beta1, kept=self.beta2),
        )
        optimizer.assign("lion", in_scope(self.scope))


def lion(
    ops: Any, update: Any, param: Any, state: dict[str, Any], *, mixed: float, kept: float
) -> Any:
    """Return -1, 0 or 1 for each weight (N, ...); 0 where update and momentum have always been 0."""
    mean = state["momentum"]
    made = mean * mixed + update * (1 - mixed)
    zero = ops.zeros_like(made)
    sign = ops.where(made > 0, zero + 1, zero) - ops.where(made < 0, zero + 1, zero)
    return sign, {"momentum": mean * kept + update * (1 - kept)}
