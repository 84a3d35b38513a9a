"""Attention by FlashAttention-4: windows by the keys that they leave, documents packed end to end.

A window is a number that the kernel reads on the host. One that changes during a run is a 0-d array of the CPU,
an input of the compiled step, so that all windows share it. Documents are given as the places where they begin,
in a table of fixed size that is computed on the device: no synchronisation. What the table cannot say is NaN in
the result, never another document's tokens: more documents in a batch than :func:`most_documents`, or numbers of
documents that fall, so that tokens of one might lie apart.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from flash_attn.cute.interface import (  # pyright: ignore[reportMissingImports]
    _flash_attn_bwd,
    _flash_attn_fwd,
)
from torch import Tensor, library

from minillm_core import BackendError

__all__ = ["attention", "most_documents"]

AVERAGE = 128  # tokens: documents behind a row's first are as long, on average over the batch
FEWEST = 64  # documents of a small batch
HOPPER = (9, 0)
ALIGNED = 8  # elements: the kernel loads 16 bytes at a time


def attention(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, K, D)
    v: Tensor,  # (B, S, K, D)
    *,
    scale: float | None = None,
    window: int | Tensor | None = None,  # a tensor: 0-d, on the CPU
    documents: Tensor | None = None,  # int32 (B, S)
) -> Tensor:
    """Return softmax(scale q k^T + mask) v (B, T, H, D): see minillm's contract of the op.

    4 B T W H D FLOPs forward, W the keys that a query sees. With :func:`torch.use_deterministic_algorithms`
    the gradient of q is summed in a fixed order, without in any.

    Raises:
        BackendError: the GPU is older than Hopper.
    """
    (B, T, H, D), S = q.shape, k.shape[1]
    scale = D**-0.5 if scale is None else scale
    changing, fixed = (window, S) if isinstance(window, Tensor) else (None, window or S)
    if documents is None:
        return _attention(q, k, v, None, None, None, changing, scale, fixed, T, S)[0]
    queries, keys, valid = _bounds(documents, T)
    packed = (x.flatten(0, 1) for x in (q, k, v))
    y = _attention(*packed, queries, keys, valid, changing, scale, fixed, T, S)[0]
    return y.view(B, T, H, D)


def most_documents(rows: int, tokens: int) -> int:
    """Return how many documents a batch of rows of so many tokens has at most, in all its rows together.

    The kernel's time grows with this number, whatever the documents: with 64 for each of 64 rows of 1,024
    tokens attention took twice as long as with the documents alone.
    """
    return max(FEWEST, rows + rows * tokens // AVERAGE)


def _bounds(documents: Tensor, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find where documents begin and end among packed queries and keys.

    Args:
        documents: int32 (B, S); a negative number is padding.
        queries: T, the last positions of each row.

    Returns:
        int32 (M + 1,) of queries, 0 to B T, and of keys, 0 to B S, for M = most_documents(B, S), the
        unused entries of which are the last place; and () bool: the documents are as they are taken to be.
    """
    B, S = documents.shape
    later, earlier = documents[:, 1:], documents[:, :-1]
    begins = torch.cat([torch.ones_like(documents[:, :1]), (later != earlier).int()], dim=1)
    counted = begins.flatten().cumsum(0)  # (B S,) int64: the documents so far
    most = most_documents(B, S)
    order = torch.arange(1, most + 1, device=documents.device)
    first = torch.searchsorted(counted, order)  # B S where there are fewer
    keys = torch.cat([first, first.new_full((1,), B * S)])
    falls = (later < earlier) & (later >= 0)
    valid = (counted[-1] <= most) & ~falls.any()
    whole = torch.cat([order - 1, order[-1:]]) * S  # row by row: lengths that the kernel can take
    keys = torch.where(valid, keys, whole.clamp(max=B * S))
    at = torch.clamp(keys % S - (S - queries), min=0)  # the place in its row among the queries
    return (keys // S * queries + at).int(), keys.int(), valid


@library.custom_op(
    "minillm_cute::attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? queries, Tensor? keys, Tensor? valid, "
    "Tensor? changing, float scale, int window, int longest_q, int longest_k) -> (Tensor, Tensor)",
)
def _attention(
    q: Tensor,  # (B, T, H, D), or packed (B T, H, D)
    k: Tensor,  # (B, S, K, D), or packed (B S, K, D)
    v: Tensor,
    queries: Tensor | None,  # int32 (M + 1,), where packed
    keys: Tensor | None,  # int32 (M + 1,)
    valid: Tensor | None,  # () bool
    changing: Tensor | None,  # () on the CPU: the window, in place of the fixed one
    scale: float,
    window: int,
    longest_q: int,
    longest_k: int,
) -> tuple[Tensor, Tensor]:
    """Compute y in q's shape, and the logarithms of the sums, float32 (B, H, T) or (H, B T)."""
    found = torch.cuda.get_device_capability(q.device)
    if found < HOPPER:
        raise BackendError(
            f"FlashAttention-4 trains on GPUs of capability 9.0 or later, not {found[0]}.{found[1]}",
            where="--kernels attention=fa4",
            fix="cute.attention=false",
        )
    seen = _seen(changing, window, queries, keys, longest_q, longest_k)
    with _without_warnings():
        y, logs, *_ = _flash_attn_fwd(
            *map(_loadable, (q, k, v)),
            softmax_scale=scale,
            causal=True,
            return_lse=True,
            **seen,
        )
    if valid is not None:
        y[..., 0, 0].masked_fill_(~valid, float("nan"))
    return y, logs


@_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tensor | None,
    keys: Tensor | None,
    valid: Tensor | None,
    changing: Tensor | None,
    scale: float,
    window: int,
    longest_q: int,
    longest_k: int,
) -> tuple[Tensor, Tensor]:
    *rows, T, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((*rows, H, T), dtype=torch.float32)


@library.custom_op(
    "minillm_cute::attention_backward",
    mutates_args=(),
    schema="(Tensor up, Tensor q, Tensor k, Tensor v, Tensor y, Tensor logs, Tensor? queries, Tensor? keys, "
    "Tensor? changing, float scale, int window, int longest_q, int longest_k) -> (Tensor, Tensor, Tensor)",
)
def _backward(
    up: Tensor,  # as y
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    logs: Tensor,
    queries: Tensor | None,
    keys: Tensor | None,
    changing: Tensor | None,
    scale: float,
    window: int,
    longest_q: int,
    longest_k: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v."""
    seen = _seen(changing, window, queries, keys, longest_q, longest_k)
    with _without_warnings():
        return _flash_attn_bwd(
            *map(_loadable, (q, k, v, y, up)),
            logs,
            scale,
            True,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **seen,
        )


@_backward.register_fake
def _(up: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, queries, keys, _, changing, *numbers = inputs
    ctx.save_for_backward(q, k, v, *output, queries, keys, changing)
    ctx.numbers = numbers
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, up: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return *_backward(up, *ctx.saved_tensors, *ctx.numbers), *(8 * [None])


_attention.register_autograd(_gradients, setup_context=_save)


def _seen(
    changing: Tensor | None,
    window: int,
    queries: Tensor | None,
    keys: Tensor | None,
    longest_q: int,
    longest_k: int,
) -> dict[str, Any]:
    """Return FlashAttention's arguments for a window and documents."""
    width = window if changing is None else int(changing)
    left, right = (width - 1, 0) if width < longest_k else (None, None)
    seen: dict[str, Any] = {"window_size_left": left, "window_size_right": right}
    if queries is None:
        return seen
    bounds = {"cu_seqlens_q": queries, "cu_seqlens_k": keys}
    return seen | bounds | {"max_seqlen_q": longest_q, "max_seqlen_k": longest_k}


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Hide a warning of CuTe that each form gives when it is compiled."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Argument .* cannot be converted to a JitArgument")
        yield


def _loadable(x: Tensor) -> Tensor:
    """Return x, or a copy of it if 16 bytes of a head cannot be loaded at once."""
    aligned = x.stride(-1) == 1 and all(step % ALIGNED == 0 for step in x.stride()[:-1])
    return (
        x
        if aligned and x.storage_offset() % ALIGNED == 0
        else x.clone(memory_format=torch.contiguous_format)
    )
