"""Where tokens become vectors, and vectors logits: the embedding and the untied head."""

from __future__ import annotations

from typing import Any

from minillm_core.nn.geometry import Geometry
from minillm_core.nn.init import Normal
from minillm_core.nn.linear import Linear
from minillm_core.nn.module import Module
from minillm_core.nn.param import Param

__all__ = ["Embedding", "head_of"]

HEAD_STD = 0.02
"""Logits near 0: the first loss is the logarithm of the vocabulary."""


class Embedding(Module):
    """ids int32 (B, T) -> (B, T, C)."""

    leaf = "embedding"

    def __init__(self, geometry: Geometry, *, tied: bool) -> None:
        super().__init__()
        self.weight = Param(
            (geometry.vocab, geometry.dim),
            axes=("vocab", "dim"),
            init=Normal(HEAD_STD if tied else 1.0),
            role="embedding.token",
        )

    def forward(self, ids: Any) -> Any:
        """ids int32 (B, T) -> (B, T, C)."""
        return self.ops.embedding(ids, self.weight)


def head_of(geometry: Geometry) -> Linear:
    """The untied head, (V, C)."""
    return Linear(
        geometry.dim,
        geometry.vocab,
        role="head",
        axes=("vocab", "dim"),
        init=Normal(HEAD_STD),
    )
