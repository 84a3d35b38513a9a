"""Sparse loss: the head and the cross-entropy at supervised positions alone.

In a chat the answers alone are supervised, half of the positions in typical data, yet the product with
the head, a fifth to two fifths of a small model's FLOPs, is computed at every position. Here the residual
stream after the last attention is gathered first, (B T, C) -> (S, C), before the last MLP or, where a
plugin reads a later activation, before the head; its gradient is scattered back to the same positions.
Loss and gradients are the same to rounding: an unsupervised position adds 0 to both.

S is the number of supervised positions, rounded up to one of a few sizes (label buckets), since a
compiled step has one graph per size: more buckets waste less of the head, fewer take less time to
compile. Micro-batches of 32 x 1,024 tokens of one data set fall into one to five of 32 buckets.

Evaluation is unchanged: the head is computed at every position.
"""

from __future__ import annotations

from minillm_core import Plugin, option

__all__ = ["SparseLoss"]


class SparseLoss(Plugin, api=1):
    """Computes the head and the loss at supervised positions alone: chats train faster."""

    buckets: int = option(
        32,
        ge=2,
        le=256,
        help="number of label buckets: sizes to which supervised positions are rounded up",
    )

    def compute_loss(self, loss):
        loss.gather(buckets=self.buckets)
