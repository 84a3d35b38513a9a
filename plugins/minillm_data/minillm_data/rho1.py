"""Selective language modelling of Rho-1: train on tokens of high excess loss (arXiv:2404.07965).

A reference model, trained before on text like the run's target, estimates the achievable loss of each
token. A token's excess loss is the trained model's loss minus the reference's. Tokens of high excess
are still to be learnt; tokens of low excess are learnt already, or are noise that the reference cannot
predict either. Only the share with the highest excess is trained on.

The selection is over all supervised tokens of a micro-batch, so it depends on ``train.rows``. The
objective is the mean loss of the selected tokens: the sum of their losses, over their count. The
reported loss stays the plain one over all tokens, so runs are comparable. Token weights of another
plugin (the field ``weights``) apply to the selected tokens. With ``jest``, tokens are selected from the
rows that it keeps.

Cost: a forward pass of the reference, and a second output projection for the compared losses. Nothing
is saved: tokens that are not selected are still computed, since others attend to them.
"""

from __future__ import annotations

from typing import ClassVar

from minillm_core import FrozenModel, Module, Plugin, option

__all__ = ["ExcessLoss", "Rho1"]


class Rho1(Plugin, api=1, discrete=True):
    """Only the tokens with the highest excess loss over a reference model's are trained on."""

    model: str = option("runs/reference", help="the reference model: a run's folder", min_length=1)
    share: float = option(
        0.6, gt=0, lt=1, help="fraction of the supervised tokens that is trained on"
    )

    def compute_loss(self, loss):
        loss.reference("rho1_reference", FrozenModel(self.model), gives="losses")
        loss.weights(ExcessLoss, share=self.share)


class ExcessLoss(Module):
    """losses, reference, labels (B, T) -> float32 (B, T): supervised / chosen there, 0 elsewhere."""

    reads: ClassVar = {"reference": "rho1_reference"}
    whole = True  # the share is of the whole micro-batch's tokens, not per row

    def __init__(self, share):
        super().__init__()
        self.share = share

    def forward(self, losses, reference, labels):
        ops, shape = self.ops, losses.shape
        supervised = labels >= 0
        # unsupervised positions rank last, whatever their excess
        excess = ops.where(supervised, reference - losses, float("inf"))  # (B, T), ascending
        places = ops.reshape(excess, (-1,))
        rank = ops.argsort(ops.argsort(places))  # of each position, 0 the highest excess
        count = ops.sum(ops.astype(supervised, "float32"))
        # the share is rounded to whole tokens, half down, at least one
        chosen = ops.maximum(count * self.share, ops.like(1.0, count))
        taken = ops.astype(rank, "float32") + 0.5 < chosen
        taken = ops.astype(ops.reshape(taken, shape), "float32")
        taken = ops.where(supervised, taken, 0.0)
        number = ops.maximum(ops.sum(taken), ops.like(1.0, count))
        return taken * (count / number)
