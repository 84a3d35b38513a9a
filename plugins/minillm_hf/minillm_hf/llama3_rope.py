"""Rotary scaling of Llama 3.1: slow pairs turn more slowly (arXiv:2407.21783; config.json of the models).

    r     = L theta / 2 pi                          turns of a pair over L positions
    theta <- theta / s                              r < a
    theta <- theta (1/s + (1 - 1/s)(r - a)/(b - a)) a <= r <= b
    theta <- theta                                  r > b

L is the original context length, s the factor, a = 1 and b = 4.
"""

from __future__ import annotations

import math

import numpy as np

from minillm_core import Layers, Plugin, option

__all__ = ["Llama3Rope", "llama3"]


class Llama3Rope(Plugin, api=1, export="llama"):
    """Rotary frequencies are scaled as in Llama 3.1 and later, for a longer context than before."""

    factor: float = option(8.0, ge=1, help="divisor of the frequencies of the slowest pairs")
    low_freq_factor: float = option(
        1.0,
        gt=0,
        help="turns over the original length below which a pair's frequency is divided by factor",
    )
    high_freq_factor: float = option(
        4.0, gt=0, help="turns over the original length above which a pair's frequency is unchanged"
    )
    original_max_position_embeddings: int = option(
        8192, ge=1, help="original context length in tokens, over which turns are counted"
    )
    layers: Layers = option("all", help='layers with scaled frequencies: "all", [0, -1], "every:2"')

    def build_attention(self, attn):
        if attn.layer in self.layers.resolve(attn.layers):
            attn.rope.scaling(
                llama3,
                factor=self.factor,
                low=self.low_freq_factor,
                high=self.high_freq_factor,
                length=self.original_max_position_embeddings,
            )


def llama3(
    frequencies: np.ndarray, factor: float, low: float, high: float, length: int
) -> np.ndarray:
    """Scale frequencies in radians per position: float64 (D/2,) -> (D/2,)."""
    turns = length * frequencies / (2 * math.pi)
    between = np.clip((turns - low) / (high - low), 0.0, 1.0) if high > low else turns >= high
    return frequencies * (1 / factor + (1 - 1 / factor) * between)
