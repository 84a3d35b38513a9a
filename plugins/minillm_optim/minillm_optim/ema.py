"""EMA: an exponential moving average of the weights, used for evaluation (arXiv:2411.18704).

    a_t <- theta_t + d_t (a_(t-1) - theta_t)        after each update, theta_t its result
    d_t  = min(decay, (t - 1) / (t + 9))            t = 1, 2, ... counts averaged updates

The decay warms up, in place of a bias correction: d_1 = 0, so that the average starts as the weights
and not as zeros, and while t < 10 / (1 - decay) it covers about the last tenth of the updates, which
forgets the poor weights of the beginning. Updates are averaged after the fraction ``start`` of the run;
before that, the weights themselves are evaluated.

Training does not depend on it: in eager mode, the weights are bitwise those of a run without the plugin
(compiled code may round differently). Where the learning rate falls to 0 at the end, the average adds little:
it is meant for runs at a constant rate, and for evaluating a run before its rate decays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minillm_core import Plugin, option, plateaus, stage


class EMA(Plugin, api=1):
    """An exponential moving average of the weights is evaluated, sampled from and exported."""

    decay: float = option(
        0.999,
        gt=0,
        lt=1,
        search=(0.98, 0.99, 0.995, 0.999),
        help="decay rate of the average, after its warm-up",
    )
    start: float = option(0.0, ge=0, lt=1, help="fraction of the run after which averaging begins")

    def optimizer_factory(self, optimizer):
        begun = plateaus((0.0, 0.0), (self.start, 1.0)) if self.start else 1.0
        state = {"mean": "like", "count": "scalar"}
        moving = stage(average, state=state, decay=self.decay, begun=begun)
        optimizer.extend("*", "average", moving)
        optimizer.view(lambda name, p: True, averaged)


def average(
    ops: Any, update: Any, param: Any, state: dict[str, Any], *, decay: float, begun: Any
) -> tuple[Any, dict[str, Any]]:
    """Update the average (N, ...) with the new parameter; count (N, 1, ...) of averaged updates."""
    count = state["count"] + begun
    kept = ops.minimum(ops.maximum((count - 1.0) / (count + 9.0), 0.0), decay)
    return update, {"mean": param + kept * (state["mean"] - param), "count": count}


def averaged(ops: Any, param: Any, state: Mapping[str, Any]) -> Any:
    """Return the average; the parameter if there is no average yet."""
    return ops.where(state["average.count"] > 0, state["average.mean"], param)
