"""Train on the tokens that are worth it: Rho-1's selective language modelling (arXiv:2404.07965).

A reference model, trained before on text like that which the run is for, says what each token's loss
could be. The excess of a token is the loss of the model that is trained less that of the reference.
Tokens with a high excess are still to be learnt; those with a low one are learnt already, or are
noise that the reference cannot predict either. Only the share with the highest excess is trained on.

Chosen are the highest of all supervised tokens of a micro-batch together, so another ``train.rows``
chooses others. The objective is the mean loss over the chosen tokens: their losses, over their
count. The loss that is reported is still the plain one over all tokens, so runs can be compared.
A weight that another plugin gives a token (the field ``weights``) counts for the chosen ones. Beside
``jest`` the tokens are chosen of the rows that it keeps.

What it costs: a forward pass of the reference, and the head's product once more for the losses that
are compared. Nothing is saved: a token that is not chosen is computed, as others attend to it.
"""

from __future__ import annotations

from typing import ClassVar

from minillm_core import FrozenModel, Module, Plugin, option

__all__ = ["ExcessLoss", "Rho1"]


class Rho1(Plugin, api=1, discrete=True):
    """Only the tokens with the highest excess loss over a reference model's are trained on."""

    model: str = option("runs/reference", help="the reference: a run's folder", min_length=1)
    share: float = option(0.6, gt=0, lt=1, help="of the supervised tokens that are trained on")

    def compute_loss(self, loss):
        loss.reference("rho1_reference", FrozenModel(self.model), gives="losses")
        loss.weights(ExcessLoss, share=self.share)


class ExcessLoss(Module):
    """losses, reference, labels (B, T) -> float32 (B, T): supervised / chosen there, 0 elsewhere."""

    reads: ClassVar = {"reference": "rho1_reference"}
    whole = True  # its share is of the micro-batch's tokens, whatever rows they are in

    def __init__(self, share):
        super().__init__()
        self.share = share

    def forward(self, losses, reference, labels):
        ops, shape = self.ops, losses.shape
        supervised = labels >= 0
        # what is not supervised comes last, whatever its excess
        excess = ops.where(supervised, reference - losses, float("inf"))  # (B, T), to be ascending
        places = ops.reshape(excess, (-1,))
        rank = ops.argsort(ops.argsort(places))  # of each position, 0 the highest excess
        count = ops.sum(ops.astype(supervised, "float32"))
        # half a token up, at least one
        chosen = ops.maximum(count * self.share, ops.like(1.0, count))
        taken = ops.astype(rank, "float32") + 0.5 < chosen
        taken = ops.astype(ops.reshape(taken, shape), "float32")
        taken = ops.where(supervised, taken, 0.0)
        number = ops.maximum(ops.sum(taken), ops.like(1.0, count))
        return taken * (count / number)
