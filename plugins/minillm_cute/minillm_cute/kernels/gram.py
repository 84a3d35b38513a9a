"""Symmetric products of a batch of matrices by QuACK, for Hopper: tiles on one side of the diagonal, written twice.

Muon's Newton-Schulz and Polar Express consist of them: an iteration takes 3 R^2 C + R^3 FLOPs instead of
4 R^2 C + 2 R^3.
"""

from __future__ import annotations

import torch
from quack.gemm_symmetric import gemm_symmetric  # pyright: ignore[reportMissingImports]
from torch import Tensor, library

from minillm_cute.kernels.hopper import check_hopper

__all__ = ["gram"]

ALIGNED = 8  # elements: the kernel loads 16 bytes at a time
# Of 12 x 768 x 3,072 on an H200: 50 us; QuACK's own choice, 128 x 256 in clusters of two, 72; cuBLAS 68.
TILE = {"tile_M": 128, "tile_N": 128, "cluster_M": 1, "cluster_N": 1, "pingpong": True}


def gram(x: Tensor, alpha: float = 1.0, beta: float = 0.0, gamma: float = 0.0) -> Tensor:
    """Compute alpha x x^T + beta x + gamma I: (N, R, C) -> (N, R, R); see minillm's contract of the op.

    QuACK multiplies bfloat16 and float16 of sizes that are multiples of 8, torch all others.

    Raises:
        BackendError: the GPU is not a Hopper.
    """
    return _gram(x, alpha, beta, gamma)


@library.custom_op(
    "minillm_cute::gram",
    mutates_args=(),
    schema="(Tensor x, float alpha, float beta, float gamma) -> Tensor",
)
def _gram(x: Tensor, alpha: float, beta: float, gamma: float) -> Tensor:
    where, fix = "--kernels gram=quack", "cute.gram=false"
    check_hopper(x.device, "QuACK's products run", where=where, fix=fix)
    N, R, C = x.shape
    if x.dtype not in (torch.bfloat16, torch.float16) or R % ALIGNED or C % ALIGNED:
        made = torch.baddbmm(x, x, x.mT, beta=beta, alpha=alpha) if beta else alpha * (x @ x.mT)
        made = made.contiguous()
    else:
        x = x if x.is_contiguous() or x.mT.is_contiguous() else x.contiguous()
        made = x.new_empty((N, R, R))
        added, by = (x, beta) if beta else (None, 1.0)
        gemm_symmetric(x, x, made, added, None, **TILE, alpha=alpha, beta=by)
    if gamma:
        made.diagonal(dim1=-2, dim2=-1).add_(gamma)  # R numbers, where a sum would be R^2
    return made


@_gram.register_fake
def _(x: Tensor, alpha: float, beta: float, gamma: float) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1], x.shape[1]))
