"""Attention on torch: scaled_dot_product_attention, and the composed form it is compared with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["composed", "sdpa"]


def sdpa(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, K, D)
    v: Tensor,  # (B, S, K, D)
    *,
    scale: float | None = None,
    window: int | Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """torch's fused kernels: flash where plainly causal, memory-efficient or math with a mask.

    Plainly causal, 2 B T^2 H D FLOPs forward and no T^2 memory; with a mask twice the FLOPs, and
    T S (window) or B T S (documents) bytes for the mask.
    """
    queries, keys = q.shape[1], k.shape[1]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H or K, T or S, D)
    grouped = q.shape[1] != k.shape[1]
    window = None if isinstance(window, int) and window >= keys else window
    if window is None and documents is None and queries in (1, keys):
        # torch's is_causal is upper-left: right where T = S; a single last query sees every key.
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=queries == keys, scale=scale, enable_gqa=grouped
        )
    else:
        if grouped:  # no kernel but math takes a mask and groups together
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        mask = _visible(queries, keys, window, documents, q.device)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return y.transpose(1, 2)


def composed(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, K, D)
    v: Tensor,  # (B, S, K, D)
    *,
    scale: float | None = None,
    window: int | Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """The formula: scores, mask, softmax in float32, product. 4 B H T S + 2 B H T S bytes and up."""
    queries, keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))  # (B, S, H, D)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bthd,bshd->bhts", q * factor, k)
    scores = scores.float() if scores.dtype != torch.float64 else scores
    mask = _visible(queries, keys, window, documents, q.device)
    p = scores.masked_fill(~mask, -torch.inf).softmax(-1).to(v.dtype)
    return torch.einsum("bhts,bshd->bthd", p, v)


def _visible(
    queries: int,
    keys: int,
    window: int | Tensor | None,
    documents: Tensor | None,
    device: torch.device,
) -> Tensor:
    """bool (T, S), or (B, 1, T, S) with documents (B, S); the queries are the last T positions."""
    j = torch.arange(keys, device=device)
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - j
    mask = distance >= 0
    if window is not None:
        mask = mask & (distance < window)
    if documents is not None:
        own = documents[:, None, keys - queries :, None] == documents[:, None, None, :]
        mask = mask & own
    return mask
