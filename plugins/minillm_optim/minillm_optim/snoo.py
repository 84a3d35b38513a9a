"""Snoo: every K-th update is followed by a Nesterov step of slow weights (arXiv:2510.15830).

    f: the fast weights, moved by updates;  s: the slow ones;  after every K-th update

    d <- s - f                              their movement since
    m <- mu m + d
    s <- s - eta (d + mu m)                 torch's SGD, nesterov, of d as a gradient
    f <- s

It is Lookahead, and DiLoCo with one worker, with a momentum: eta 1 and mu 0 are the inner optimizer alone,
bitwise. modded-nanogpt's second track (record of 2025-09-16) has it with Muon and Adam; its values are
the defaults here. Slow weights start as those after the first update, and outer steps follow the updates
K + 1, 2 K + 1 ...; there everything is one update earlier. Two more numbers per weight are stored: s and m. A
parameter whose learning rate is 0 (``freeze``) is unchanged. It conflicts with ``schedule_free``, whose own points
refer to the parameter: they would refer to a place that the outer step has left.
"""

from __future__ import annotations

from typing import Any

from minillm_core import Plugin, option, stage

__all__ = ["Snoo", "outer", "unless_still"]


class Snoo(Plugin, api=1):
    """Every K-th update is followed by a Nesterov step of slow weights."""

    every: int = option(28, ge=1, help="updates between two outer steps")
    lr: float = option(0.68, gt=0, search=(0.5, 0.68, 0.9), help="learning rate of the outer steps")
    momentum: float = option(0.37, ge=0, lt=1, help="Nesterov momentum of the outer steps")

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
    """Compute parameter and slow weights after an outer step; param, slow, momentum (...), begun (1, ...)."""
    slow = ops.where(state["begun"] > 0, state["slow"], param)
    difference = slow - param
    mean = state["momentum"] * momentum + difference
    inner = lr == 1 and momentum == 0  # s - (s - f) would round
    new = param if inner else slow - (difference + mean * momentum) * lr
    new = unless_still(ops, new, param, lr_mul)
    return new, {"slow": new, "momentum": mean, "begun": ops.ones_like(state["begun"])}


def unless_still(ops: Any, new: Any, param: Any, lr_mul: Any) -> Any:
    """Return ``new``, or param (...) where the factor on its learning rate is 0: a number, 0-d or (N, 1, ...)."""
    if isinstance(lr_mul, (int, float)):
        return new if lr_mul else param
    return ops.where(lr_mul == 0, param, new)
