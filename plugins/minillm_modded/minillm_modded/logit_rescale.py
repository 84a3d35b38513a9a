"""Logit scale: the product of the last norm and the head, times a constant (modded-nanogpt, record 21).

    z = s x W^T,     s = C^-1/2 unless given

The last norm gives x the length C^1/2, so that a head with entries of order one gives logits of
order one at any width: a learning rate has the same effect on the head at all widths (muP,
Yang et al., arXiv:2203.03466). The record has it inside its cap, 15 sigmoid(z / 7.5), as
``softcap`` does here: caps apply to scaled logits. Record 54 dropped the scale and shifted the
sigmoid instead, 23 sigmoid((z + 5) / 7.5); that is ``softcap`` alone. A head with small initial
values, as minillm's, learns slowly with a small s: raise its learning rate (``role_lr``), as the records did.

Evaluation and generation use the same logits. At s = 1 it has no effect.
"""

from __future__ import annotations

from minillm_core import PlanError, Plugin, option

__all__ = ["LogitRescale"]


class LogitRescale(Plugin, api=1):
    """Logits are multiplied by a constant: C^-1/2, or a given number."""

    scale: float | None = option(None, gt=0, help="factor on the logits; none: C^-1/2")

    def compute_loss(self, loss):
        scale = loss.dim**-0.5 if self.scale is None else self.scale
        if scale == 1:
            raise PlanError(
                "logit_rescale multiplies logits by 1",
                where=f"logit_rescale.scale={self.scale}",
                fix="another number, or leave logit_rescale out",
            )
        loss.logits(scale=scale)
