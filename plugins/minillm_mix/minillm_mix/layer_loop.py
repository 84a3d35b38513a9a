"""Layers in the middle run several times, late in a run (slowrun, 2026; universal transformers, arXiv:1807.03819).

    x <- block_last( ... block_first(x))        `times` rounds, from a share of the run on; one before it

A model that reads its text over and over runs out of text before it runs out of time: a second
round of the same layers is more computation on the same parameters. slowrun repeats a few of its
last half two or three times in its last epochs. Before that each layer runs once, and a step costs
no more; the step is compiled for both.

Between the rounds nothing is added but what plugins add at each of those layers anyhow. The model is
evaluated, sampled from and continued with all rounds from the start on, so that held-out losses before
that share are of a model that is not trained for it. Each round has a KV cache of its own.
"""

from __future__ import annotations

from minillm_core import PlanError, Plugin, option, stages

__all__ = ["LayerLoop"]


class LayerLoop(Plugin, api=1):
    """Some layers run twice or more, one round after the other, from a share of the run on."""

    first: int | None = option(None, ge=0, help="of the layers; none: the middle of the model")
    last: int | None = option(None, ge=0, help="of them; none: the last but one of the model")
    times: int = option(2, ge=2, le=16, search=(2, 3), help="rounds in all")
    start: float = option(0.75, ge=0, lt=1, help="share of the run from which they run so often")

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
