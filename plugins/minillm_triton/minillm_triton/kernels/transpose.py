"""Transposed copies of 8-bit matrices, in tiles of whole cache lines."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["transpose"]

SIDE = 128  # of a tile: its rows and its columns are cache lines
WARPS = 8


def transpose(x: Tensor, out: Tensor) -> None:
    """Copy x (n, m) uint8 to out (m, n'), n' >= n, whose further columns are set to 0."""
    (n, m), wide = x.shape, out.shape[1]
    tiles = -(-wide // SIDE) * -(-m // SIDE)
    _transpose[(tiles,)](x, out, n, m, wide, side=SIDE, num_warps=WARPS)


@triton.jit
def _transpose(
    x,  # (n, m)
    out,  # (m, wide)
    n,
    m,
    wide,
    side: tl.constexpr,
):
    """Transpose a tile; columns of ``out`` from n on are 0."""
    tiles = (m + side - 1) // side  # in a row of tiles
    first = tl.full((), side, tl.int64)  # places of a large matrix exceed 32 bits
    row = first * (tl.program_id(0) // tiles) + tl.arange(0, side)
    column = first * (tl.program_id(0) % tiles) + tl.arange(0, side)
    inside = (row[:, None] < n) & (column[None, :] < m)
    tile = tl.load(x + row[:, None] * m + column[None, :], mask=inside, other=0)
    inside = (column[:, None] < m) & (row[None, :] < wide)
    tl.store(out + column[:, None] * wide + row[None, :], tl.trans(tile), mask=inside)
