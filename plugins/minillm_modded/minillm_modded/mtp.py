"""Multi-token prediction: early in training, each position also predicts the tokens after the next.

    loss = CE(t + 1) + 0.5 CE(t + 2) + 0.25 CE(t + 3)

One head and one hidden state serve all targets (Gloeckle et al., arXiv:2404.19737, use one head
per target; modded-nanogpt, by varunneal, shares it): the logits are computed once and shared by the
targets. The run starts with all targets; in equal stages the furthest one's weight falls to 0 and it
is removed, until only the next token is left: [1, 0.5, 0.25 -> 0], [1, 0.5 -> 0], [1]. A removed
target is no longer part of the compiled step. Targets cross document boundaries, as labels do.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from minillm_core import Plugin, option, piecewise

__all__ = ["MTP"]

Weight = Annotated[float, Field(gt=0)]


class MTP(Plugin, api=1):
    """Prediction of further tokens, with loss weights that fall to 0 one after the other."""

    weights: tuple[Weight, ...] = option(
        (0.5, 0.25),
        min_length=1,
        max_length=8,
        help="initial loss weights of the tokens 2, 3, ... ahead",
    )
    end: float = option(
        0.67, gt=0, le=1, help="fraction of the run after which only the next token is predicted"
    )

    def compute_loss(self, loss):
        count = len(self.weights)
        for index, weight in enumerate(self.weights):
            falling, gone = (self.end * (count - index - one) / count for one in (1, 0))
            falls = piecewise((falling, weight), (gone, 0.0))
            loss.target(falls, offset=2 + index, until=gone)
