"""Symmetric products of a batch of matrices: tiles on and below the diagonal, mirrored.

Muon's Newton-Schulz and Polar Express consist of them (Keller Jordan, 2024; arXiv:2505.16932): they reduce the
4 R^2 C + 2 R^3 FLOPs of an iteration to 3 R^2 C + R^3. modded-nanogpt's record of 2025-07 (byronxu99) has a
kernel of this kind.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, library

__all__ = ["gram"]

DEPTH, STAGES = 64, 3  # of a product's inner axis, and the number of pipeline stages
TILES = {2: (128, 8), 4: (64, 4)}  # bytes per number -> rows of a program's tile, and its warps


def gram(x: Tensor, alpha: float = 1.0, beta: float = 0.0, gamma: float = 0.0) -> Tensor:
    """Compute alpha x x^T + beta x + gamma I: (N, R, C) -> (N, R, R); see minillm's contract of the op.

    About N R^2 C FLOPs, and N R^2 numbers written.
    """
    return _gram(x, alpha, beta, gamma)


@library.custom_op(
    "minillm_triton::gram",
    mutates_args=(),
    schema="(Tensor x, float alpha, float beta, float gamma) -> Tensor",
)
def _gram(x: Tensor, alpha: float, beta: float, gamma: float) -> Tensor:
    N, R, C = x.shape
    made = torch.empty((N, R, R), dtype=x.dtype, device=x.device)
    tile, warps = TILES[x.element_size()]
    count = -(-R // tile)
    _tiles[(N * count * count,)](
        *(x, made, R, C, *x.stride(), count, alpha, beta, gamma),
        add=beta != 0.0,
        tile=tile,
        depth=DEPTH,
        num_warps=warps,
        num_stages=STAGES,
    )
    return made


@_gram.register_fake
def _(x: Tensor, alpha: float, beta: float, gamma: float) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1], x.shape[1]))


@triton.jit
def _tiles(
    x,  # (N, R, C)
    made,  # (N, R, R)
    R,
    C,
    by_matrix,  # the strides of x: Muon gives a tall matrix transposed, without copying it
    by_row,
    by_column,
    count,  # tiles along R
    alpha,
    beta,
    gamma,
    add: tl.constexpr,
    tile: tl.constexpr,
    depth: tl.constexpr,
):
    """Compute one tile of one matrix, and its mirror image; programs above the diagonal do nothing."""
    program = tl.program_id(0)
    i, j = program // count % count, program % count
    if j <= i:
        matrix = tl.cast(program // (count * count), tl.int64)
        x += matrix * by_matrix
        made += matrix * R * R
        rows, others = i * tile + tl.arange(0, tile), j * tile + tl.arange(0, tile)
        total = tl.zeros((tile, tile), dtype=tl.float32)
        for first in range(0, C, depth):
            inner = first + tl.arange(0, depth)
            left = tl.load(  # (tile, depth)
                x + rows[:, None] * by_row + inner[None, :] * by_column,
                mask=(rows < R)[:, None] & (inner < C)[None, :],
                other=0.0,
            )
            right = tl.load(  # (tile, depth)
                x + others[:, None] * by_row + inner[None, :] * by_column,
                mask=(others < R)[:, None] & (inner < C)[None, :],
                other=0.0,
            )
            total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
        total *= alpha
        here = rows[:, None] * R + others[None, :]
        inside = (rows < R)[:, None] & (others < R)[None, :]
        if add:
            there = rows[:, None] * by_row + others[None, :] * by_column
            total += beta * tl.load(x + there, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(rows[:, None] == others[None, :], gamma, 0.0)
        tile_made = total.to(made.dtype.element_ty)
        tl.store(made + here, tile_made, mask=inside)
        if j < i:
            mirrored = others[:, None] * R + rows[None, :]
            inside = (others < R)[:, None] & (rows < R)[None, :]
            tl.store(made + mirrored, tl.trans(tile_made), mask=inside)
