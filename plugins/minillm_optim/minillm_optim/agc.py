"""Adaptive gradient clipping: a unit's gradient is at most a share of the unit (arXiv:2102.06171).

    g_i <- g_i min(1, clipping max(|w_i|, epsilon) / |g_i|)

A unit i is a row of a matrix, the weights of one output or of one token, and the whole of a vector;
| | is its Euclidean norm. Epsilon lets units that start at 0 move. It joins the gradients of every rule,
behind the clipping of the global norm (``train.clip``; 0 leaves that out, as in the paper), which it
replaces where single layers, and not the model as a whole, have gradients that jump. The paper leaves the
head out; here a row of it is clipped as any other.
"""

from __future__ import annotations

from typing import Any

from minillm_core import Plugin, option, stage

__all__ = ["AGC", "clip_units"]

TINY = 1e-30  # of a norm: a unit without a gradient stays without


class AGC(Plugin, api=1):
    """A row's gradient is clipped to a share of the row's own norm."""

    clipping: float = option(
        0.01, gt=0, search=(0.01, 0.03, 0.1), help="largest norm of a gradient, in norms of its row"
    )
    epsilon: float = option(1e-3, gt=0, help="least norm of a row: rows of 0 move")
    rules: tuple[str, ...] = option(
        ("*",), min_length=1, help='update rules; "*" is all there are, ["adamw"] leaves out Muon'
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
    """update, param (..., C) -> the update, no row of it longer than its share of param's."""

    def norm(x: Any) -> Any:
        return ops.sqrt(ops.sum(ops.square(x), -1, keepdims=True))  # (..., 1)

    most = clipping * ops.maximum(norm(param), epsilon)
    return update * ops.minimum(most / ops.maximum(norm(update), TINY), 1.0), state
