"""SWA: the mean of the weights over the end of a run, which is what is evaluated (arXiv:1803.05407).

    a_n <- a_(n-1) + (theta_t - a_(n-1)) / n        n = 1, 2, ... weights that are averaged

over every update of the last share of the run (``last``), or with ``every = k`` over every k-th one: those
of the updates k, 2 k, 3 k ... With k of some hundred it is the mean of the checkpoints that LAWA takes
(arXiv:2306.03241), all of the tail and not the latest few, so that one array holds it. Before the tail the
weights themselves are evaluated.

Training never sees it: eager, a run has the weights, bit by bit, of a run without the plugin (compiled
code may round otherwise).
"""

from __future__ import annotations

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
        help="share of the run that is averaged, at its end",
    )
    every: int = option(1, ge=1, help="updates between two weights that are averaged")

    def optimizer_factory(self, optimizer):
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
    """Take the new parameter into the mean, (N, ...); count, (N, 1, ...), are those averaged so far."""
    due = begun
    if period > 1:
        due = ops.where(updates % float(period) == 0, ops.ones_like(updates), 0.0) * begun
    count = state["count"] + due
    share = due / ops.maximum(count, 1.0)
    return update, {"mean": state["mean"] + share * (param - state["mean"]), "count": count}


def averaged(ops: Any, param: Any, state: Mapping[str, Any]) -> Any:
    """Return the mean; the parameter where there is none yet."""
    return ops.where(state["average.count"] > 0, state["average.mean"], param)
