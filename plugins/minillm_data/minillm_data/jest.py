"""Select the most learnable rows, judged by a reference model (JEST, arXiv:2406.17711).

Each micro-batch is a super-batch of ``train.rows`` rows. The trained model and a previously trained
reference model both compute its losses without gradients; a row's learnability is the mean of its
tokens' losses minus the reference's. The share of rows with the highest learnability then gets a
forward and backward pass: a true sub-batch, selected on the device.

JEST samples its sub-batch in chunks, since under a contrastive loss rows depend on each other. A
language model's loss is a sum over rows, so the most learnable sub-batch consists of the most
learnable rows, and these are selected.

The reported loss is that of the whole super-batch and so comparable with a plain run's; the objective
is the mean over the tokens of the selected rows. Tokens per second count all rows.

Cost: a forward pass of both models over all rows. With a quarter selected and a reference of the same
size, a step takes 2 x 2 N FLOPs per token for selection and 6 N / 4 for training, 5.5 N instead of
6 N, and trains on a quarter of the tokens: it pays off if a selected token is worth four.
"""

from __future__ import annotations

from typing import ClassVar

from minillm_core import FrozenModel, Module, Plugin, option

__all__ = ["Jest", "Learnability"]


class Jest(Plugin, api=1, discrete=True):
    """Only the rows of each micro-batch that are most learnable, by a reference model, are trained on."""

    model: str = option("runs/reference", help="the reference model: a run's folder", min_length=1)
    keep: float = option(
        0.25, gt=0, lt=1, help="fraction of train.rows that is trained on, rounded to whole rows"
    )

    def compute_loss(self, loss):
        loss.reference("jest_reference", FrozenModel(self.model), gives="losses")
        loss.rows(Learnability, keep=self.keep)


class Learnability(Module):
    """losses, reference, labels (B, T) -> float32 (B,): the mean excess of a row's supervised tokens."""

    reads: ClassVar = {"reference": "jest_reference"}

    def forward(self, losses, reference, labels):
        ops = self.ops
        supervised = ops.astype(labels >= 0, "float32")
        count = ops.sum(supervised, 1)
        excess = ops.sum((losses - reference) * supervised, 1)
        mean = excess / ops.maximum(count, ops.ones_like(count))
        return ops.where(count > 0, mean, -1e9)  # a row of padding ranks last
