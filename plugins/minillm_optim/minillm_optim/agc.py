"""Adaptive gradient clipping: a unit's gradient norm is at most a fraction of the unit's own (arXiv:2102.06171).

    g_i <- g_i min(1, clipping max(|w_i|, epsilon) / |g_i|)

A unit i is a row of a matrix, the weights of one output or of one token, or a whole vector;
| | is its Euclidean norm. Epsilon lets units that start at 0 move. It applies to the gradients of every rule,
after clipping by the global norm (``train.clip``; 0 disables that, as in the paper), which it
replaces if the gradients of single layers spike, not those of the whole model. The paper leaves the
head out; here its rows are clipped like any other.
"""

from __future__ import annotations

from typing import Any

from minillm_core import Plugin, option, stage

__all__ = ["AGC", "clip_units"]

TINY = 1e-30  # of a norm: a unit without gradient stays unchanged


class AGC(Plugin, api=1):
    """A row's gradient is clipped to a share of the row's own norm."""

    clipping: float = option(
        0.01,
        gt=0,
        search=(0.01, 0.03, 0.1),
        help="maximum norm of a row's gradient, as a fraction of the row's norm",
    )
    epsilon: float = option(
        1e-3, gt=0, help="lower bound of a row's norm, so that rows of zeros can move"
    )
    rules: tuple[str, ...] = option(
        ("*",), min_length=1, help='update rules it applies to; "*": all; ["adamw"] leaves out Muon'
    )

    def optimizer_factory(self, optimizer):
        clip = stage(clip_units, clipping=self.clipping, epsilon=self.epsilon)
        for rule in self.rules:
            optimizer.gradient(rule, clip)


def clip_units(
    ops: Any,
    update: Any,
    param: Any,
    state: dict[str, Any],
    *,
    clipping: float,
    epsilon: float,
) -> Any:
    """Clip the update so that no row exceeds its fraction of param's row norm; update, param (..., C)."""

    def norm(x: Any) -> Any:
        return ops.sqrt(ops.sum(ops.square(x), -1, keepdims=True))  # (..., 1)

    most = clipping * ops.maximum(norm(param), epsilon)
    return update * ops.minimum(most / ops.maximum(norm(update), TINY), 1.0), state
