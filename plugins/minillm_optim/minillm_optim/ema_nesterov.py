"""EMA-Nesterov: gradients are taken at a look-ahead point along an average of past updates (arXiv:2605.25395).

    y <- x + beta_t m                         where the gradient is taken: the trained parameter
    x' = any rule's update of y
    m <- gamma m + (1 - gamma) (x' - x),  x <- x'

Nesterov's look-ahead with a mean over hundreds of updates as its direction. beta_t is ``beta`` times the run's
schedule between two fractions of the run, and 0 before and after. modded-nanogpt's optimization track has it with
Muon (2026-05-22: beta 0.6, from update 500 to 2,400 of 3,150) and in its best results, 0.3. Evaluation,
sampling and export use x. Stored are y, as the parameter, x and m; m starts after the first update, and beta_t is
that of the update which produced y, one update earlier than there.

beta_t is at most ``beta``, also if ``batch_schedule`` raises the rates of the run's schedule. beta 0 is the rule
alone, bitwise. Another average of the weights needs the same view: only one can be active.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minillm_core import PlanError, Plugin, option, plateaus, scheduled, stage
from minillm_optim.snoo import unless_still

__all__ = ["EMANesterov", "ahead", "behind"]


class EMANesterov(Plugin, api=1):
    """Gradients are taken ahead of the weights, along a moving average of their moves."""

    beta: float = option(
        0.6,
        ge=0,
        search=(0.3, 0.6, 0.9),
        help="look-ahead distance, in mean moves; falls with the schedule",
    )
    gamma: float = option(0.99, gt=0, lt=1, help="decay rate of the mean move")
    start: float = option(
        0.16, ge=0, lt=1, help="fraction of the run at which the look-ahead begins"
    )
    stop: float = option(0.76, gt=0, le=1, help="fraction of the run at which the look-ahead ends")

    def optimizer_factory(self, optimizer):
        if self.start >= self.stop:
            raise PlanError(
                f"ema_nesterov.start={self.start} is not before ema_nesterov.stop={self.stop}",
                where="opt.extend(*, lookahead)",
                fix="set ema_nesterov.start below ema_nesterov.stop",
            )
        off = [(0.0, 0.0)] if self.start else []
        over = [(self.stop, 0.0)] if self.stop < 1 else []
        look = stage(
            ahead,
            state={"weights": "like", "mean": "like", "begun": "scalar"},
            beta=scheduled(self.beta),
            most=self.beta,
            on=plateaus(*off, (self.start, 1.0), *over),
            gamma=self.gamma,
        )
        optimizer.extend("*", "lookahead", look)
        optimizer.view(lambda name, p: True, behind)


def ahead(
    ops: Any,
    update: Any,
    param: Any,
    state: dict[str, Any],
    *,
    beta: Any,
    most: float,
    on: Any,
    gamma: float,
    lr_mul: Any,
) -> Any:
    """Compute y from param x', weights x, mean m (...), begun (1, ...); and the new x and m."""
    before = ops.where(state["begun"] > 0, state["weights"], param)
    mean = state["mean"] * gamma + (param - before) * (1 - gamma)
    begun = ops.ones_like(state["begun"])
    point = unless_still(ops, param + mean * (ops.minimum(beta, most) * on), param, lr_mul)
    return point, {"weights": param, "mean": mean, "begun": begun}


def behind(ops: Any, param: Any, state: Mapping[str, Any]) -> Any:
    """Return x; the parameter if there was no update yet."""
    return ops.where(state["lookahead.begun"] > 0, state["lookahead.weights"], param)
