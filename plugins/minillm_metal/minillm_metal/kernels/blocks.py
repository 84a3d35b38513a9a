"""Attention in blocks of queries with MLX's own matrix products: scores outside the window are not computed.

A block of C queries is multiplied with the W + C - 1 keys that any of them sees, forward and, recomputed,
backward: B H C (W + C) scores at a time instead of B H T S. Each block depends on the previous one
(``mx.depends``), as MLX would otherwise hold the scores of all. Any head size, and any device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

__all__ = ["BLOCK", "attention"]

BLOCK = 512  # queries


def attention(
    q: mx.array,  # (B, T, H, D)
    k: mx.array,  # (B, S, K, D)
    v: mx.array,  # (B, S, K, D)
    *,
    scale: float | None = None,
    window: int | mx.array | None = None,
    documents: mx.array | None = None,  # int32 (B, S)
    block: int = BLOCK,
) -> mx.array:
    """softmax(scale q k^T + mask) v: see minillm's contract of the op.

    4 B T (W + C) H D FLOPs forward and 10 backward, with C queries per block and window W;
    without a window, or with an array as window, half of S.

    Args:
        q: queries.
        k: keys.
        v: values.
        scale: of the scores.
        window: see the contract.
        documents: see the contract.
        block: C.
    """
    shape = (*q.shape[:2], k.shape[2], -1, q.shape[3])  # (B, T, K, H / K, D)
    factor = q.shape[3] ** -0.5 if scale is None else scale

    def blocks() -> Iterator[tuple[slice, slice, mx.array]]:
        """Yield queries, the keys that any of them sees, and the mask between them, (B or 1, 1, 1, C, S)."""
        shift, last = k.shape[1] - q.shape[1], q.shape[1]
        for start in range(0, last, block):
            rows = slice(start, min(start + block, last))
            first = max(0, start + shift - window + 1) if isinstance(window, int) else 0
            keys = slice(first, rows.stop + shift)
            at = mx.arange(start + shift, rows.stop + shift)
            behind = at[:, None] - mx.arange(keys.start, keys.stop)
            seen = behind >= 0
            if window is not None:
                seen = seen & (behind < window)
            seen = seen[None]
            if documents is not None:
                ids = documents[:, start + shift : rows.stop + shift]
                seen = seen & (ids[:, :, None] == documents[:, None, keys])
            yield rows, keys, seen[:, None, None]

    def weights(q: mx.array, k: mx.array, seen: mx.array) -> mx.array:
        """Compute p float32 (B, K, H / K, C, S) of queries in the form of grouped(), keys (B, K, 1, S, D)."""
        scores = ((q * factor) @ k.swapaxes(-1, -2)).astype(mx.float32)
        return mx.softmax(mx.where(seen, scores, -mx.inf), axis=-1)

    def grouped(x: mx.array) -> mx.array:
        """Group heads: (B, T, H, D) -> (B, K, H / K, T, D)."""
        return x.reshape(*x.shape[:2], *shape[2:]).transpose(0, 2, 3, 1, 4)

    def forward(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        made: list[mx.array] = []
        queries, kv = grouped(q), [x.swapaxes(1, 2)[:, :, None] for x in (k, v)]
        for rows, keys, seen in blocks():
            one = queries[:, :, :, rows]
            if made:
                (one,) = mx.depends([one], [made[-1]])
            p = weights(one, kv[0][:, :, :, keys], seen)
            made.append(p.astype(v.dtype) @ kv[1][:, :, :, keys])
        return mx.concatenate(made, axis=3).transpose(0, 3, 1, 2, 4).reshape(q.shape)

    attended: Any = mx.custom_function(forward)

    @attended.vjp
    def pull_back(
        primals: tuple[mx.array, ...], cotangent: mx.array, output: mx.array
    ) -> tuple[mx.array, ...]:
        q, k, v = primals
        queries, up, kv = (
            grouped(q),
            grouped(cotangent),
            [x.swapaxes(1, 2)[:, :, None] for x in (k, v)],
        )
        offset = grouped(cotangent.astype(mx.float32) * output.astype(mx.float32)).sum(
            -1, keepdims=True
        )
        dk, dv = (mx.zeros(x.swapaxes(1, 2).shape, mx.float32) for x in (k, v))
        dq: list[mx.array] = []
        for rows, keys, seen in blocks():
            one, dy = queries[:, :, :, rows], up[:, :, :, rows]
            if dq:
                (one,) = mx.depends([one], [dq[-1], dk, dv])
            k_, v_ = (x[:, :, :, keys] for x in kv)
            p = weights(one, k_, seen)
            ds = p * ((dy @ v_.swapaxes(-1, -2)).astype(mx.float32) - offset[:, :, :, rows])
            ds = (factor * ds).astype(q.dtype)
            dq.append(ds @ k_)
            dk = dk.at[:, :, keys].add((ds.swapaxes(-1, -2) @ one).astype(mx.float32).sum(2))
            dv = dv.at[:, :, keys].add(
                (p.astype(v.dtype).swapaxes(-1, -2) @ dy).astype(mx.float32).sum(2)
            )
        dq_ = mx.concatenate(dq, axis=3).transpose(0, 3, 1, 2, 4).reshape(q.shape)
        return dq_, dk.swapaxes(1, 2).astype(k.dtype), dv.swapaxes(1, 2).astype(v.dtype)

    return attended(q, k, v)
