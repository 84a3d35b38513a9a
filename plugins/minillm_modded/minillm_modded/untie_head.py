"""Head and embedding are tied for two thirds of the run, then separate (modded-nanogpt, records 51, 53).

    head = embedding          until 2/3 of the run: one matrix, one gradient, one optimizer state
    head, embedding           after it: both start from the tied values, Adam's moments included

A tied matrix learns from both of its uses and halves the number of parameters (Press and Wolf,
arXiv:1608.05859); late in a run the two uses favour different values. Record 51 tied the head of the
speedrun again, and later ones untied it during the run (by classiclarryd).

The plan's parameters do not change during a run: both matrices are allocated from the start, with their
gradients and moments; the gain is in the loss, not in memory. Until they are separated, the
run equals one with ``model.tied=true``. An export has a separate head, at any step; before the separation
it equals the embedding. Both start with a tied matrix's small initial values, so that ``embed_norm``
sets the scale of the stream, as in the records.

It requires ``model.tied=false``. Another initial value of the head (``zero_init.head``) or other
betas of one of the two conflict with it; other learning rates apply after the separation.
"""

from __future__ import annotations

from minillm_core import Normal, PlanError, Plugin, option

__all__ = ["UntieHead"]

HEAD, EMBEDDING = "head.weight", "embedding.weight"
STD = 0.02
"""Initial standard deviation of a tied matrix: all logits are then nearly equal, and the first loss is ln V."""


class UntieHead(Plugin, api=1):
    """The head is tied to the embedding for a part of the run, and separate from then on."""

    until: float = option(
        2 / 3,
        gt=0,
        lt=1,
        search=(1 / 3, 2 / 3),
        help="fraction of the run during which head and embedding are tied",
    )

    def build_model(self, model):
        model.init(EMBEDDING, Normal(STD))

    def optimizer_factory(self, optimizer):
        if HEAD not in optimizer.parameters:
            raise PlanError(
                "untie_head needs a separate head, but this model's head is the embedding",
                where="model.tied=true",
                fix="model.tied=false, or leave untie_head out",
            )
        optimizer.follow(HEAD, EMBEDDING, until=self.until)
