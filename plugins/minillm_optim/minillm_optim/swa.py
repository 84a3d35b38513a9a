"""SWA: the mean of the weights over the end of a run, used for evaluation (arXiv:1803.05407).

    a_n <- a_(n-1) + (theta_t - a_(n-1)) / n        n = 1, 2, ... counts averaged weights

over every update of the last fraction of the run (``last``), or with ``every = k`` over every k-th one: the
updates k, 2 k, 3 k ... With k of some hundred it is the mean of checkpoints as in LAWA
(arXiv:2306.03241), over the whole tail instead of the latest few, so that one array suffices. Before the tail
the weights themselves are evaluated.

Training does not depend on it: in eager mode, the weights are bitwise those of a run without the plugin
(compiled code may round differently).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from minillm_core import Plugin, option, plateaus, stage


class SWA(Plugin, api=1):
    """The mean of the weights over the end of the run is evaluated, sampled from and exported."""

    last: float = option(
        0.2,
        gt=0,
        le=1,
        search=(0.1, 0.2, 0.3),
        help="last fraction of the run, whose weights are averaged",
    )
    every: int = option(
        1,
        ge=1,
        help="updates between two averaged weights; a multiple of it has to be in that last fraction",
    )

    def optimizer_factory(self, optimizer):
        if self.every > 1:
            optimizer.note(
                f"the last {self.last:g} of a run of fewer than "
                f"{math.ceil(self.every / self.last):,} steps may have no multiple of "
                f"swa.every={self.every}: then the weights themselves are evaluated"
            )
        begun = plateaus((0.0, 0.0), (1.0 - self.last, 1.0)) if self.last < 1 else 1.0
        state = {"mean": "like", "count": "scalar"}
        tail = stage(mean, state=state, period=self.every, begun=begun)
        optimizer.extend("*", "average", tail)
        optimizer.view(lambda name, p: True, averaged)


def mean(
    ops: Any,
    update: Any,
    param: Any,
    state: dict[str, Any],
    *,
    period: int,
    begun: Any,
    updates: Any,
) -> tuple[Any, dict[str, Any]]:
    """Update the mean (N, ...) with the new parameter; count, (N, 1, ...), is the number of averaged updates."""
    due = begun
    if period > 1:
        due = ops.where(updates % float(period) == 0, ops.ones_like(updates), 0.0) * begun
    count = state["count"] + due
    share = due / ops.maximum(count, 1.0)
    return update, {"mean": state["mean"] + share * (param - state["mean"]), "count": count}


def averaged(ops: Any, param: Any, state: Mapping[str, Any]) -> Any:
    """Return the mean; the parameter if there is no mean yet."""
    return ops.where(state["average.count"] > 0, state["average.mean"], param)
