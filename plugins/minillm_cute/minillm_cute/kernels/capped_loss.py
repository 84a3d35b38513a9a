"""Linear cross-entropy with a softcap, for Hopper: exponentials in the place of logits, and no maximum.

A softcap bounds the logits, so that exp cannot overflow. The first product's epilogue, by QuACK, writes
exp(logit) times the softcap's slope, sums exp over each tile of the vocabulary, and keeps the target's
product. One program per row then computes the loss and replaces the target's entry, and cuBLAS computes both
gradients. With S = sum over v of exp(logit[v]) and a slope without its constant factor,

    d loss / d product[v] = (exp(logit[v]) - [v = target] S) slope[v] factor / S

whose factor / S is a number per row: the hidden state's gradient is multiplied by it behind its product, and
the hidden state in front of the weight's.
"""

from __future__ import annotations

from functools import cache
from math import log
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from quack.activation import tanh  # pyright: ignore[reportMissingImports]
from quack.epilogue.frontend import gemm_epilogue  # pyright: ignore[reportMissingImports]
from quack.epilogue.math import F2, pexp2  # pyright: ignore[reportMissingImports]
from quack.epilogue.ops import (  # pyright: ignore[reportMissingImports]
    ColVecLoad,
    ColVecReduce,
    ColVecSelect,
)
from torch import Tensor

__all__ = ["capped_losses"]

TILE = 128  # of the first product, rows and columns: a vocabulary is a whole number of tiles
CHUNK_BYTES = 200 * 2**20  # of exponentials: 2,048 rows for a vocabulary of 50,304
LOG2_E = 1.0 / log(2.0)


def capped_losses(
    hidden: Tensor,  # (N, C) bfloat16, C a multiple of 8
    weight: Tensor,  # (V, C) bfloat16, V a multiple of 128
    target: Tensor,  # (N,) int32, below 0 where unsupervised
    cap: list[float],  # middle, height, rate, shift
    of_hidden: bool,
    of_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute losses with logits ``middle + height tanh(rate product + shift)``.

    Returns:
        Losses float32 (N,), 0 where unsupervised, and their sum's gradients, empty if not wanted: of the
        hidden states (N, C), of the weight (V, C) float32.
    """
    (N, C), V = hidden.shape, len(weight)
    rows = min(N, TILE * max(1, CHUNK_BYTES // (TILE * V * weight.element_size())))
    middle, height, rate, shift = cap
    epilogue = _epilogue(middle * LOG2_E, height * LOG2_E, rate, shift)
    exps = weight.new_empty((rows, V))  # exp(logit) slope
    tile_sums = torch.empty((rows, V // TILE), dtype=torch.float32, device=hidden.device)
    products = torch.empty(rows, dtype=torch.float32, device=hidden.device)  # the target's
    factors = torch.empty((rows, 1), dtype=torch.float32, device=hidden.device)
    scaled = torch.empty((rows, C), dtype=hidden.dtype, device=hidden.device)
    losses = torch.empty(N, dtype=torch.float32, device=hidden.device)
    grad_hidden = torch.empty_like(hidden) if of_hidden else hidden.new_empty(0)
    shape = (V, C) if of_weight else (0,)
    grad_weight = torch.zeros(shape, dtype=torch.float32, device=hidden.device)
    for start in range(0, N, rows):
        h, t = hidden[start : start + rows], target[start : start + rows]  # (n, C), (n,)
        n = len(h)
        e = exps[:n]  # (n, V)
        of_rows = {"sum_exp": tile_sums[:n], "target": t, "target_logit": products[:n]}
        tiles = {"tile_M": TILE, "tile_N": TILE, "cluster_M": 2, "cluster_N": 1, "pingpong": True}
        epilogue.gemm(h, weight, e, epi_args=of_rows, **tiles)
        _rows[(n,)](
            *(tile_sums, products, t, h, e, losses[start : start + rows], factors, scaled),
            *(middle, height, rate, shift, height * rate, V // TILE, C),
            V=V,
            block_tiles=triton.next_power_of_2(V // TILE),
            block_columns=triton.next_power_of_2(C),
            num_warps=4,
        )
        if of_hidden:
            of_h = grad_hidden[start : start + rows]
            torch.mm(e, weight, out=of_h).mul_(factors[:n])
        if of_weight:
            _add_product(grad_weight, e.T, scaled[:n])
    return losses, grad_hidden, grad_weight


@cache
def _epilogue(middle: float, height: float, rate: float, shift: float) -> Any:
    """Build the epilogue of a softcap: middle and height in units of log 2."""
    target = ColVecLoad("target")

    @gemm_epilogue(
        reduces={"sum_exp": ColVecReduce("sum_exp")},
        outs={"target_logit": ColVecSelect("target_logit", idx_op=target)},
        extra_ops=(target,),
    )
    def capped(acc):  # float32, one number of a product or two; QuACK reads this source
        t = _tanh(acc * rate + shift)
        e = pexp2(t * height + middle)
        return {"D": e * (1.0 - t * t), "sum_exp": e, "target_logit": acc}

    return capped


def _tanh(x: Any) -> Any:
    return F2(*tanh((x[0], x[1]))) if isinstance(x, tuple) else tanh(x)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a b to total (V, C) float32; a (V, n), b (n, C)."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


@triton.jit
def _rows(
    tile_sums_at,  # (n, tiles) float32
    products_at,  # (n,) float32
    targets_at,  # (n,) int32
    hidden_at,  # (n, C)
    exps_at,  # (n, V): the target's entry is replaced
    losses_at,  # (n,) float32
    factors_at,  # (n, 1) float32
    scaled_at,  # (n, C): the hidden state times the factor
    middle,
    height,
    rate,
    shift,
    factor,  # the slope's constant factor
    tiles,
    C,
    V: tl.constexpr,
    block_tiles: tl.constexpr,
    block_columns: tl.constexpr,
):
    """Compute a row's loss and factor from its sums, and finish what both gradients are computed from."""
    row = tl.program_id(0)
    tile = tl.arange(0, block_tiles)
    total = tl.sum(tl.load(tile_sums_at + row * tiles + tile, mask=tile < tiles, other=0.0), 0)
    target = tl.load(targets_at + row)
    supervised = target >= 0
    # QuACK writes no product of an unsupervised row
    product = tl.load(products_at + row, mask=supervised, other=0.0)
    t = 2.0 * tl.sigmoid(2.0 * (product * rate + shift)) - 1.0
    logit = middle + height * t
    tl.store(losses_at + row, tl.where(supervised, tl.log(total) - logit, 0.0))
    there = exps_at + tl.full((), V, tl.int64) * row + tl.maximum(target, 0)
    entry = (tl.exp(logit) - total) * (1.0 - t * t)
    tl.store(there, entry.to(exps_at.dtype.element_ty), mask=supervised)
    by = tl.where(supervised, factor / total, 0.0)
    tl.store(factors_at + row, by)
    column = tl.arange(0, block_columns)
    h = tl.load(hidden_at + row * C + column, mask=column < C, other=0.0).to(tl.float32)
    tl.store(scaled_at + row * C + column, (h * by).to(scaled_at.dtype.element_ty), mask=column < C)
