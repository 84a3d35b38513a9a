"""Layer loops: middle layers run several times (slowrun, 2026; universal transformers, arXiv:1807.03819).

    x <- block_last( ... block_first(x))        `times` rounds after a fraction of the run; one before it

Runs over many epochs are limited by text before they are limited by time: a further round of the same
layers adds computation without parameters. slowrun repeats a few layers of its
second half two or three times in its last epochs. Before that each layer runs once, at no extra
cost; the step is compiled for both.

Between the rounds only the terms that plugins add at each of those layers are added. Evaluation,
sampling and continuation use all rounds from the start, so that held-out losses before
that fraction are of a model not yet trained for it. Each round has its own KV cache. The lanes of
``hyper_connections`` pass from each layer to the next, and not from round to round: the two are refused.
"""

from __future__ import annotations

from minillm_core import PlanError, Plugin, option, stages

__all__ = ["LayerLoop"]


class LayerLoop(Plugin, api=1):
    """Layers that run several times, from a given fraction of the run on."""

    first: int | None = option(
        None, ge=0, help="first layer of the loop; none: the middle of the model"
    )
    last: int | None = option(
        None, ge=0, help="last layer of the loop; none: the model's last but one"
    )
    times: int = option(2, ge=2, le=16, search=(2, 3), help="number of rounds")
    start: float = option(
        0.75, ge=0, lt=1, help="fraction of the run after which the layers are looped"
    )

    def build_model(self, model):
        first = model.layers // 2 if self.first is None else self.first
        last = max(first, model.layers - 2) if self.last is None else self.last
        if not first <= last < model.layers:
            raise PlanError(
                f"layer_loop cannot run layers {first} to {last} of {model.layers}",
                where=f"model.layers={model.layers}",
                fix=f"layer_loop.first and .last, 0 to {model.layers - 1}, in this order",
            )
        rounds = stages((0, 1), (self.start, self.times)) if self.start else self.times
        model.loop(first, last, rounds)
