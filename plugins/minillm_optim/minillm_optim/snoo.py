"""Snoo: every K-th update is followed by a Nesterov step of slow weights (arXiv:2510.15830).

    f: the weights that updates move;  s: the slow ones;  in every K-th update, behind it

    d <- s - f                              how far they came since
    m <- mu m + d
    s <- s - eta (d + mu m)                 torch's SGD, nesterov, of d as a gradient
    f <- s

It is Lookahead, and DiLoCo of one worker, with a momentum: eta 1 and mu 0 are the inner optimizer alone, bit by
bit. modded-nanogpt's second track (record of 2025-09-16) has it beside Muon and Adam, with the numbers that are
the defaults here. Slow weights begin as those behind the first update, and outer steps are behind the updates
K + 1, 2 K + 1 ...; there all of it is one update earlier. Two numbers a weight more are kept: s and m. A parameter
whose rate is 0 (``freeze``) stays. It is refused beside ``schedule_free``, which keeps points of its own around
the parameter: those would be of a place that the outer step has left.
"""

from __future__ import annotations

from typing import Any

from minillm_core import Plugin, option, stage

__all__ = ["Snoo", "outer", "unless_still"]


class Snoo(Plugin, api=1):
    """Every K-th update is followed by a Nesterov step of slow weights."""

    every: int = option(28, ge=1, help="updates from one outer step to the next")
    lr: float = option(0.68, gt=0, search=(0.5, 0.68, 0.9), help="learning rate of the outer steps")
    momentum: float = option(0.37, ge=0, lt=1, help="of the outer steps, Nesterov's")

    def optimizer_factory(self, optimizer):
        steps = stage(
            outer,
            state={"slow": "like", "momentum": "like", "begun": "scalar"},
            every=self.every,
            lr=self.lr,
            momentum=self.momentum,
        )
        optimizer.extend("*", "lookahead", steps)


def outer(
    ops: Any,
    update: Any,
    param: Any,
    state: dict[str, Any],
    *,
    lr: float,
    momentum: float,
    lr_mul: Any,
) -> Any:
    """param, slow, momentum (...), begun (1, ...) -> the parameter after an outer step; and slow is that."""
    slow = ops.where(state["begun"] > 0, state["slow"], param)
    difference = slow - param
    mean = state["momentum"] * momentum + difference
    inner = lr == 1 and momentum == 0  # s - (s - f) would round
    new = param if inner else slow - (difference + mean * momentum) * lr
    new = unless_still(ops, new, param, lr_mul)
    return new, {"slow": new, "momentum": mean, "begun": ops.ones_like(state["begun"])}


def unless_still(ops: Any, new: Any, param: Any, lr_mul: Any) -> Any:
    """Return new, or param (...) where the factor on its rate is 0: a number, 0-d or (N, 1, ...)."""
    if isinstance(lr_mul, (int, float)):
        return new if lr_mul else param
    return ops.where(lr_mul == 0, param, new)
