"""YaRN: a longer context by rotary scaling and sharper attention (Peng et al., arXiv:2309.00071).

    d(r)  = D log(L / 2 pi r) / (2 log base)        index of the pair that turns r times over L positions
    g_i   = clip((i - d(fast)) / (d(slow) - d(fast)), 0, 1)
    theta <- theta (g / s + 1 - g)
    logits <- m^2 logits,  m = 0.1 ln s + 1

L is the original context length, s the factor. As in Transformers, d is rounded outwards to whole pairs
(truncate); the paper does not round.
"""

from __future__ import annotations

import math

import numpy as np

from minillm_core import Layers, PlanError, Plugin, option

__all__ = ["YarnRope", "yarn"]


class YarnRope(Plugin, api=1, export="llama"):
    """Rotary frequencies and the scale of attention by YaRN, for texts longer than before."""

    factor: float = option(4.0, ge=1, help="ratio of the new context length to the original one")
    original_max_position_embeddings: int = option(
        8192, ge=1, help="original context length in tokens, over which turns are counted"
    )
    beta_fast: float = option(
        32.0, gt=0, help="turns from which on a pair's frequency is unchanged"
    )
    beta_slow: float = option(
        1.0, gt=0, help="turns up to which a pair's frequency is divided by factor"
    )
    attention_factor: float | None = option(
        None, gt=0, help="factor m, whose square multiplies the logits; none: 0.1 ln(factor) + 1"
    )
    truncate: bool = option(
        True, help="round the two pairs' indices outwards, as Transformers does"
    )
    layers: Layers = option("all", help='layers with YaRN: "all", [0, -1], "every:2"')

    def build_attention(self, attn):
        if attn.layer not in self.layers.resolve(attn.layers):
            return
        if attn.head_dim < 4:
            raise PlanError(
                f"YaRN needs two pairs of features or more, and a head is {attn.head_dim} wide",
                where="yarn_rope",
                fix="wider heads: model.head_dim=4 or more",
            )
        attn.rope.scaling(
            yarn,
            factor=self.factor,
            length=self.original_max_position_embeddings,
            fast=self.beta_fast,
            slow=self.beta_slow,
            truncate=self.truncate,
        )
        m = self.attention_factor or 0.1 * math.log(self.factor) + 1.0
        if m != 1.0:
            attn.scale(m * m * attn.head_dim**-0.5)


def yarn(
    frequencies: np.ndarray, factor: float, length: int, fast: float, slow: float, truncate: bool
) -> np.ndarray:
    """Scale frequencies in radians per position: float64 (D/2,) -> (D/2,); trailing zeros do not rotate.

    Raises:
        PlanError: fewer than two pairs rotate, so the ratio of the geometric sequence is unknown.
    """
    turning = int(np.count_nonzero(frequencies))
    if turning < 2:
        raise PlanError(
            f"YaRN slows pairs of features that turn with the position, and {turning} of the "
            f"{len(frequencies)} do in this layer",
            where="yarn_rope",
            fix="leave yarn_rope out of this layer (yarn_rope.layers), or the plugin that stops them",
        )
    step = math.log(frequencies[0] / frequencies[1])  # 2 log(base) / D

    def pair(turns: float) -> float:
        return math.log(length * frequencies[0] / (2 * math.pi * turns)) / step

    first, last = pair(fast), pair(slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    # Transformers clips to D - 1, though there are D/2 pairs
    first, last = max(first, 0), min(last, 2 * len(frequencies) - 1)
    if first == last:
        last += 0.001
    slowed = np.clip((np.arange(len(frequencies)) - first) / (last - first), 0.0, 1.0)
    return frequencies * (slowed / factor + 1.0 - slowed)
