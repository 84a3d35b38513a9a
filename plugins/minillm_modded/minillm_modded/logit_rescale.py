"""Logits are a product of the last norm and the head, times a number (modded-nanogpt, record 21).

    z = s x W^T,     s = C^-1/2 unless given

The last norm leaves x with length C^1/2, so that a head whose entries have size one gives logits of
size one at any width: what a learning rate does to the head is alike in models of all widths (muP,
Yang et al., arXiv:2203.03466). The record has it inside its cap, 15 sigmoid(z / 7.5), which
``softcap`` beside this is: caps bound what was scaled. Record 54 gave the number up and moved the
sigmoid instead, 23 sigmoid((z + 5) / 7.5); that is ``softcap`` alone. A head that starts small, as
minillm's does, is slow with a small s: raise its learning rate (``role_lr``), as the records did.

Held-out text is judged, and text written, with the same logits. At s = 1 it is an identity.
"""

from __future__ import annotations

from minillm_core import PlanError, Plugin, option

__all__ = ["LogitRescale"]


class LogitRescale(Plugin, api=1):
    """Logits are C^-1/2 times the product of the last norm and the head, or as many times as given."""

    scale: float | None = option(None, gt=0, help="of the product; none: C^-1/2")

    def compute_loss(self, loss):
        scale = loss.dim**-0.5 if self.scale is None else self.scale
        if scale == 1:
            raise PlanError(
                "logit_rescale multiplies logits by 1",
                where=f"logit_rescale.scale={self.scale}",
                fix="another number, or leave logit_rescale out",
            )
        loss.logits(scale=scale)
