"""The sizes that a node may ask for: a constructor that names ``geometry`` is given this."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Geometry"]


@dataclass(frozen=True)
class Geometry:
    """Sizes of the model, and of the place in it."""

    layers: int
    dim: int  # C
    heads: int  # H
    kv_heads: int  # K; H is a multiple of it
    head_dim: int  # D
    hidden: int  # width inside the MLP
    vocab: int  # V
    positions: int  # longest row that will be fed; not part of the plan's hash
    layer: int | None = None  # of this place; None outside the blocks
