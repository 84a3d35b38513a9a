"""Uniform initial values for v and o, at half the usual standard deviation (modded-nanogpt, record 64).

    attention.v, attention.o ~ U(-b, b),    b = sqrt(3) s,    s = 1/2 C^-1/2

s is the standard deviation; C the width of the stream. Before, the record's attention.o started at
zero (``zero_init``), so that attention.v had no gradient in the first step. The MLPs' second matrices
stay at zero there:
``zero_init.attention=false`` with it. minillm's default is normal, with s = C^-1/2 and (2 C L)^-1/2.

Parameters are found by their role, so that another plugin's attention is included.
"""

from __future__ import annotations

from minillm_core import Plugin, Uniform, option

__all__ = ["ValueInit"]


class ValueInit(Plugin, api=1):
    """The projections to values and out of attention start uniform, at half of C^-1/2."""

    size: float = option(
        0.5, gt=0, search=(0.25, 0.5, 1.0), help="initial standard deviation, in units of C^-1/2"
    )

    def build_model(self, model):
        bound = 3**0.5 * self.size * model.dim**-0.5
        for role in ("attention.v", "attention.o"):
            model.init_role(role, Uniform(bound))
