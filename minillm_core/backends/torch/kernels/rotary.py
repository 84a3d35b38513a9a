"""Rotary position embedding on torch, in float32, from the table."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm_core.ops.contract import Rotary

__all__ = ["rotate"]


def rotate(q: Tensor, k: Tensor, table: Rotary) -> tuple[Tensor, Tensor]:
    """Both rotated by their position's angles: q (B, T, H, D), k (B, T, K, D).

    Memory-bound: each reads and writes B T (H + K) D elements.
    """
    if table.positions is None:
        cos, sin = (x.narrow(0, 0, q.shape[1]) for x in (table.cos, table.sin))
    else:
        cos, sin = table.cos[table.positions], table.sin[table.positions]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # (T, 1, D/2) or (B, T, 1, D/2)
    return _turned(q, cos, sin), _turned(k, cos, sin)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)  # float32 from here by promotion with the table
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
