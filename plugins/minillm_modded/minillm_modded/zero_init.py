"""Zero-initialised projections: every block starts as the identity (modded-nanogpt, record 5).

    attention.o = 0,  mlp.down = 0,  on request head = 0

The stream is the embedding until blocks have learned something, as in Fixup (Zhang et al.,
arXiv:1901.09321) and in the limit of muP (Yang et al., arXiv:2203.03466), which also starts the
head at zero: its first gradient is then independent of the seed, and the first loss is ln V. The
matrices before a zero matrix have no gradient in the first step.

Parameters are found by their role, so that another plugin's MLP is included.
"""

from __future__ import annotations

from minillm_core import PlanError, Plugin, option, zeros

__all__ = ["ZeroInit"]


class ZeroInit(Plugin, api=1):
    """The projections that add to the stream start at zero; optionally the head too."""

    attention: bool = option(True, help="zero attention's output projections")
    mlp: bool = option(True, help="zero the MLPs' second matrices")
    head: bool = option(
        False, search=(False, True), help="zero the head, if it is not tied to the embedding"
    )

    def build_model(self, model):
        wanted = {"attention.o": self.attention, "mlp.down": self.mlp, "head": self.head}
        roles = [role for role, zeroed in wanted.items() if zeroed]
        if not roles:
            raise PlanError(
                "zero_init has nothing to do: attention, mlp and head are all false",
                where="zero_init.attention, .mlp, .head",
                fix="set one of them, or leave zero_init out",
            )
        for role in roles:
            model.init_role(role, zeros)
