"""AdEMAMix: AdamW with a second, slow mean of gradients (arXiv:2409.03137).

    m1 <- beta1 m1 + (1 - beta1) g           m2 <- beta3(t) m2 + (1 - beta3(t)) g
    v  <- beta2 v + (1 - beta2) g^2
    p  <- p - lr ((m1^ + alpha(t) m2) / (sqrt(v^) + epsilon) + wd p)

m1^ and v^ are divided by 1 - beta^t, t the updates of this rule; m2 is not. Both warm up over a fraction T of the run: alpha rises linearly
from 0, and beta3 from beta1 such that the mean's half-life rises linearly:

    beta3(t) = exp(ln b3 / ((1 - t/T) ln b3 / ln b1 + t/T))             b = beta1, beta3; beta1 0: b3^(T/t)

The slow mean covers gradients of thousands of updates, while the fast one follows the newest: three
numbers of state per weight instead of two. The paper's beta3 of 0.9999 is meant for runs of 100,000 updates
and more; a run of n updates needs a half-life well below n. A parameter with a beta1 of its own (``role_lr.betas``)
above beta3 has that beta1 in both means.
"""

from __future__ import annotations

import math
from typing import Any

from minillm_core import PlanError, Plugin, option, piecewise, scheduled, stage
from minillm_optim.adaptive import ADAMS_LR, unbiased
from minillm_optim.scope import Scope, in_scope

__all__ = ["AdEMAMix", "two_means"]

LEAST = 1e-6  # of t/T with beta1 0, where beta3(t) is 0


class AdEMAMix(Plugin, api=1):
    """AdamW with a second, slow mean of gradients beside the fast one."""

    lr: float = option(
        ADAMS_LR, gt=0, search=(5e-4, 1.5e-3, 5e-3, 1.5e-2), help="peak learning rate"
    )
    beta1: float = option(0.9, ge=0, lt=1, help="decay rate of the fast mean of gradients")
    beta2: float = option(0.999, ge=0, lt=1, help="decay rate of the mean of squared gradients")
    beta3: float = option(
        0.999, gt=0, lt=1, help="decay rate of the slow mean of gradients, after its warm-up"
    )
    alpha: float = option(
        5.0, ge=0, search=(2.0, 5.0, 8.0), help="weight of the slow mean, after its warm-up"
    )
    warmup: float = option(
        1.0, gt=0, le=1, help="fraction of the run over which beta3 and alpha rise"
    )
    epsilon: float = option(1e-8, gt=0, help="constant added to the root of the mean of squares")
    weight_decay: float | None = option(
        None, ge=0, help="decoupled weight decay, times the learning rate; none: train.weight_decay"
    )
    scope: Scope = option("all", help="parameters with this rule: all, hidden (matrices), rest")

    def optimizer_factory(self, optimizer):
        if self.beta3 < self.beta1:
            raise PlanError(
                f"ademamix.beta3={self.beta3} is below ademamix.beta1={self.beta1}: the slow mean "
                "would be the faster one",
                where="opt.rule[ademamix]",
                fix=f"ademamix.beta3={self.beta1} or more, or ademamix.beta1={self.beta3} or less",
            )
        means = stage(
            two_means,
            state={"fast": "like", "slow": "like", "square": "like", "count": "scalar"},
            beta1=self.beta1,
            beta2=self.beta2,
            beta3=self.beta3,
            alpha=self.alpha,
            epsilon=self.epsilon,
            warm=piecewise((0.0, 0.0), (self.warmup, 1.0)),
        )
        optimizer.rule(
            "ademamix",
            lr=scheduled(self.lr),
            weight_decay=self.weight_decay,
            precondition=means,
        )
        optimizer.assign("ademamix", in_scope(self.scope))


def two_means(
    ops: Any,
    update: Any,
    param: Any,
    state: dict[str, Any],
    *,
    beta1: float,
    beta2: float,
    beta3: float,
    alpha: float,
    epsilon: float,
    warm: Any,
) -> Any:
    """Compute the update from both means (...); ``warm``, from 0 to 1, is the fraction t/T."""
    log3 = math.log(max(beta1, beta3))
    ratio = log3 / math.log(beta1) if beta1 else 0.0
    slowness = ops.exp(log3 / ops.maximum(ratio + warm * (1.0 - ratio), LEAST))  # beta3(t)
    fast = state["fast"] * beta1 + update * (1 - beta1)
    slow = state["slow"] * slowness + update * (1 - slowness)
    square = state["square"] * beta2 + ops.square(update) * (1 - beta2)
    count = state["count"] + 1.0
    root = ops.sqrt(unbiased(ops, square, beta2, count))
    mean = unbiased(ops, fast, beta1, count) + slow * (alpha * warm)
    kept = {"fast": fast, "slow": slow, "square": square, "count": count}
    return mean / (root + epsilon), kept
