"""Symmetric products X X^T of a batch of matrices: the lower triangle is computed and mirrored.

N R^2 C FLOPs instead of 2 N R^2 C, in tiles of 32 x 32 that read as many bytes as MLX's of 64 x 64,
as there are half as many.
"""

from __future__ import annotations

import mlx.core as mx

from minillm_metal.kernel import Kernel

__all__ = ["GRAM", "gram"]

TILE = 32
GRAM = Kernel("gram", ("x", "sizes", "numbers"), ("y",), ("fragment",))


def gram(x: mx.array, alpha: float = 1.0, beta: float = 0.0, gamma: float = 0.0) -> mx.array:
    """Compute alpha x x^T + beta x + gamma I: (N, R, C) -> (N, R, R); see minillm's contract of the op."""
    N, R, C = x.shape
    count = -(-R // TILE)
    (y,) = GRAM.launch(
        [x, mx.array([R, C], mx.int32), mx.array([alpha, beta, gamma], mx.float32)],
        [((N, R, R), x.dtype)],
        template=[("T", x.dtype), ("ADD", beta != 0.0)],
        threadgroups=(count * (count + 1) // 2, N, 1),
        threads=128,
    )
    return y
