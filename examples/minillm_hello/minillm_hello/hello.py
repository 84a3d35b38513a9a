"""A z-loss (PaLM, section 5, arXiv:2204.02311): logits that drift away from 0 cost something.

    lse[n]  = log sum_v exp logits[n, v]                     logits (N, V), N = B T positions
    loss[n] = lse[n] - logits[n, labels[n]] + weight lse[n]^2

The softmax does not see a number that is added to all logits of a position, so nothing else holds
them near 0, where bfloat16 is finest; with lse near 0 the logits are log-probabilities.

Why it is the form of the loss and no term of its own: logits never leave the op that makes the
loss. A term would have to multiply by the head once more; the form is read by the op's kernels,
and a kernel that does not know ``z`` says so and leaves the work to one that does.

How it is counted: position by position like the cross-entropy, so over supervised positions alone,
each with the position's own weight, and divided by their number in the whole step. It is part of
the ``loss`` of training; held-out text is judged without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minillm_core import Plugin, option

if TYPE_CHECKING:  # an editor then completes what the builder offers
    from minillm_core.plugins.builders import LossBuilder

__all__ = ["ZLoss"]


class ZLoss(Plugin, api=1):
    """A small price on the size of the logits (z-loss)."""

    weight: float = option(1e-4, gt=0, help="of the squared log-sum-exp; PaLM's is 1e-4")

    def compute_loss(self, loss: LossBuilder) -> None:
        """Add the loss term; called once, while planning: nothing of the plugin runs in a step."""
        loss.logits(z=self.weight)
