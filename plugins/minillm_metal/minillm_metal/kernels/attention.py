"""Attention in tiles with a window and documents: forward and backward without (T, S) scores.

Online softmax (arXiv:2205.14135) over tiles of 32 queries; blocks of keys that no query of a tile
sees are skipped. The backward pass recomputes the scores from the log-sum-exp of each query.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from minillm_metal.kernel import Kernel

__all__ = ["FORWARD", "KEYS", "LARGEST_HEAD", "QUERIES", "attention", "block_of"]

TILE = 32  # queries, or keys, per threadgroup
LARGEST_HEAD = 128  # features: two tiles of keys fit 32 KiB, and a lane's sums fit its registers
THREADS = 128

_SEEN = ("documents", "window", "sizes", "numbers")
_HEADERS = ("fragment", "attention")
FORWARD = Kernel("attention_forward", ("q", "k", "v", *_SEEN), ("y", "lse"), _HEADERS)
_GIVEN = ("q", "k", "v", "dy", "lse", "delta", *_SEEN)
QUERIES = Kernel("attention_queries", _GIVEN, ("dq",), _HEADERS)
KEYS = Kernel("attention_keys", _GIVEN, ("dk", "dv"), _HEADERS)


def attention(
    q: mx.array,  # (B, T, H, D)
    k: mx.array,  # (B, S, K, D)
    v: mx.array,  # (B, S, K, D)
    *,
    scale: float | None = None,
    window: int | mx.array | None = None,
    documents: mx.array | None = None,  # int32 (B, S)
) -> mx.array:
    """softmax(scale q k^T + mask) v: see minillm's contract of the op.

    About 4 B T W H D FLOPs forward and 14 backward, where W is the number of keys that a query sees, rounded
    up to tiles; memory besides the result: float32 (B, H, T), twice that in the backward pass.
    """
    (_, queries, heads, size), (keys, kv_heads) = q.shape, k.shape[1:3]
    sizes = mx.array([queries, keys, heads, kv_heads], mx.int32)
    widest = mx.array([keys], mx.int32)
    seen = widest if window is None else mx.minimum(mx.array(window).astype(mx.int32), widest)
    numbers = mx.array([size**-0.5 if scale is None else scale], mx.float32)
    ids = mx.zeros((1,), mx.int32) if documents is None else documents.astype(mx.int32)
    masks = [ids, seen.reshape(1), sizes, numbers]
    template = [
        ("T", q.dtype),
        ("D", size),
        ("BLOCK", block_of(size, q.dtype)),
        ("DOCUMENTS", documents is not None),
    ]

    def forward(q: mx.array, k: mx.array, v: mx.array) -> list[mx.array]:
        B, T, H, _ = q.shape
        return FORWARD.launch(
            [q, k, v, *masks],
            [(q.shape, q.dtype), ((B, H, T), mx.float32)],
            template=template,
            threadgroups=(-(-T // TILE), H, B),
            threads=THREADS,
        )

    attended: Any = mx.custom_function(forward)

    @attended.vjp
    def pull_back(
        primals: tuple[mx.array, ...],
        cotangents: tuple[mx.array, ...],
        outputs: tuple[mx.array, ...],
    ) -> tuple[mx.array, ...]:
        q, k, v = primals
        dy, (y, lse) = cotangents[0], outputs
        (B, T, H, _), (S, K) = q.shape, k.shape[1:3]
        delta = (dy.astype(mx.float32) * y.astype(mx.float32)).sum(-1).swapaxes(1, 2)  # (B, H, T)
        given = [q, k, v, dy, lse, delta, *masks]
        (dq,) = QUERIES.launch(
            given,
            [(q.shape, q.dtype)],
            template=template,
            threadgroups=(-(-T // TILE), H, B),
            threads=THREADS,
        )
        dk, dv = KEYS.launch(
            given,
            [(k.shape, k.dtype), (v.shape, v.dtype)],
            template=template,
            threadgroups=(-(-S // TILE), K, B),
            threads=THREADS,
        )
        return dq, dk, dv

    return attended(q, k, v)[0]


def block_of(size: int, dtype: mx.Dtype) -> int:
    """Choose the rows of a tile's block: two blocks, padded, fit 18 KiB.

    >>> block_of(64, mx.float32), block_of(128, mx.bfloat16), block_of(128, mx.float32)
    (32, 32, 16)
    """
    return 32 if size * dtype.size <= 256 else 16
