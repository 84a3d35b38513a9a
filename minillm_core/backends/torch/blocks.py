"""Block-sparse attention on torch: FlexAttention (Dong et al., arXiv:2412.05496) with a window or
documents.

Blocks of 128 queries by 128 keys that are fully masked are skipped, and fully visible ones need no
mask: T W instead of T^2 / 2 products for a window of W keys. The block mask is computed on the device,
block by block, never from a (T, T) mask. A window may be an input of the graph: a window that changes
needs neither another graph nor a synchronisation. Layers with the same mask share it: their operations
are equal, and a compiled step runs each of them once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from minillm_core.backends.torch.compiling import imported, own_code
from minillm_core.backends.torch.ops import sdpa

BLOCK = 128  # queries and keys; windows are best a multiple of it
MASKED = 1 << 22  # B T S up to which SDPA takes a mask in place of a kernel compiled for the length


def flex(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, K, D)
    v: Tensor,  # (B, S, K, D)
    *,
    scale: float | None = None,
    window: int | Tensor | None = None,  # a 0-d tensor is an input of the graph
    documents: Tensor | None = None,  # int32 (B, S)
) -> Tensor:
    """Run FlexAttention over the visible blocks; plain causal attention goes to SDPA.

    About 4 B T W H D FLOPs forward, W the keys that a query sees, and almost no memory beyond the
    result. T < S (decoding) goes to SDPA as well, unless T and S are whole blocks: as under context
    parallelism. So do short texts outside of a compiled step on a GPU, such as prompts: FlexAttention
    alone is compiled for their length, which takes seconds.
    """
    queries, keys = q.shape[1], k.shape[1]
    window = None if isinstance(window, int) and window >= keys else window
    apart = queries != keys and (queries % BLOCK or keys % BLOCK)
    alone = not torch.compiler.is_compiling() and q.device.type != "cpu"
    short = alone and q.shape[0] * queries * keys <= MASKED
    if apart or short or (window is None and documents is None):
        return sdpa(q, k, v, scale=scale, window=window, documents=documents)
    attend = _compiled() if alone else flex_attention
    y = attend(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        block_mask=block_mask(keys, window, documents, q.device, before=keys - queries),
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return y.transpose(1, 2)


def block_mask(
    keys: int,
    window: int | Tensor | None,
    documents: Tensor | None,
    device: torch.device,
    *,
    before: int = 0,
) -> BlockMask:
    """Compute the block mask: which of m = ceil(T / 128) by n = ceil(S / 128) blocks are partly or fully visible.

    Args:
        keys: S.
        window: how many keys a query sees, itself included; None: all earlier ones.
        documents: int32 (B, S) ids in any order; a query sees only keys of its document. None: no mask.
        device: the device of the mask.
        before: the number of keys before the first query, whole blocks: T = S - before.
    """
    count, first = -(-keys // BLOCK), before // BLOCK
    block = torch.arange(count, dtype=torch.int32, device=device)
    apart = block[first:, None] - block  # (m, n): query's block - key's
    seen, wholly = apart >= 0, apart > 0
    if window is not None:
        seen = seen & (apart * BLOCK - (BLOCK - 1) < window)  # the nearest pair is
        wholly = wholly & (apart * BLOCK + (BLOCK - 1) < window)  # and the farthest
    if keys % BLOCK:
        wholly = wholly & (block < count - 1)[first:, None]  # the last block of queries is not full
    seen, wholly = seen[None], wholly[None]  # (1, m, n)
    if documents is not None:
        low, high = _range(documents, count)  # (B, n) each
        least, most = low[:, first:, None], high[:, first:, None]  # of queries, (B, m, 1)
        meet = (least <= high[:, None, :]) & (low[:, None, :] <= most)
        alike = (least == high[:, None, :]) & (most == low[:, None, :])
        seen, wholly = seen & meet, wholly & alike

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        i = i + before if before else i
        sees = i >= j
        if window is not None:
            sees = sees & (i - j < window)
        if documents is not None:
            sees = sees & (documents[b, i] == documents[b, j])
        return sees

    return BlockMask.from_kv_blocks(
        *_listed(seen & ~wholly),
        *_listed(wholly),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(keys - before, keys),
    )


def _range(documents: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest document id of each block: int32 (B, n) each, from (B, T)."""
    if missing := count * BLOCK - documents.shape[1]:
        documents = torch.cat([documents, documents[:, -1:].expand(-1, missing)], dim=1)
    blocks = documents.reshape(-1, count, BLOCK)
    return blocks.amin(-1), blocks.amax(-1)


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Convert a block mask (B, m, n) to counts (B, 1, m) and indices (B, 1, m, n), chosen blocks first, int32."""
    chosen = chosen[:, None].int()
    which = chosen.argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), which.int()


@cache
def _compiled() -> Callable[..., Any]:
    """Compile FlexAttention alone, for eager mode on a GPU: uncompiled it holds B H T^2 scores."""
    return imported(torch.compile)(own_code(flex_attention))
