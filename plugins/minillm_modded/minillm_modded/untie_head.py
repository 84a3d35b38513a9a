"""The head is the embedding for two thirds of the run, and then its own (modded-nanogpt, records 51, 53).

    head = embedding          until 2/3 of the run: one matrix, one gradient, one state of the optimizer
    head, embedding           after it: each begins with what both were, Adam's moments among them

A tied matrix learns from both of its uses, and half the numbers are to be found (Press and Wolf,
arXiv:1608.05859); late in a run the two want to differ. Record 51 tied the head of the
speedrun again, and later ones let go of it (by classiclarryd).

The plan's parameters do not change in a run: both matrices are there from the start, and as many bytes
of gradients and moments; what is saved is nothing, what is gained is the loss. Until they part, the
run is that of ``model.tied=true``. An export has a head of its own, at any step; before they part it
holds the embedding's numbers. Both start as a tied matrix does, small, so that ``embed_norm`` beside it
gives the stream its size, as in the records.

It needs a head: ``model.tied=false``. Another initial value of the head (``zero_init.head``) or other
betas of one of the two contradict it; other learning rates count once they have parted.
"""

from __future__ import annotations

from minillm_core import Normal, PlanError, Plugin, option

__all__ = ["UntieHead"]

HEAD, EMBEDDING = "head.weight", "embedding.weight"
STD = 0.02
"""Of a tied matrix at the start: its logits are then all alike, and the first loss is ln V."""


class UntieHead(Plugin, api=1):
    """The head is the embedding until a share of the run, and then goes by itself from there."""

    until: float = option(
        2 / 3, gt=0, lt=1, search=(1 / 3, 2 / 3), help="share of the run for which they are one"
    )

    def build_model(self, model):
        model.init(EMBEDDING, Normal(STD))

    def optimizer_factory(self, optimizer):
        if HEAD not in optimizer.parameters:
            raise PlanError(
                "untie_head lets go of a head, and the model's is the embedding for good",
                where="model.tied=true",
                fix="model.tied=false, or leave untie_head out",
            )
        optimizer.follow(HEAD, EMBEDDING, until=self.until)
