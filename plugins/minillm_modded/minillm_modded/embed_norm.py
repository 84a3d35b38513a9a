"""Embedding norm: every token enters the first block with unit RMS (modded-nanogpt, record 9).

    x0 = x / sqrt(mean(x^2) + eps)        after the lookup and everything added to it

The norm of embedding rows then has no effect: a high learning rate, 100 times a head's and more,
changes their direction but not their scale relative to the blocks. Also in BLOOM (arXiv:2211.05100),
all records since, and nanochat.
"""

from __future__ import annotations

from typing import Any

from minillm_core import Module, Plugin

__all__ = ["EmbedNorm", "UnitRMS"]

EPSILON = 1e-5


class EmbedNorm(Plugin, api=1):
    """The embedding is normalised before the first block."""

    def build_model(self, model):
        model.embed.norm(UnitRMS)


class UnitRMS(Module):
    """RMS normalisation: x (B, T, C) -> x with unit RMS over C, float32 inside."""

    def forward(self, x: Any) -> Any:
        """x (B, T, C) -> (B, T, C)."""
        return self.ops.rms_norm(x, None, EPSILON)
