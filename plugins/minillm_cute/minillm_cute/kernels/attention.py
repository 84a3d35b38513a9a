"""Attention by FlashAttention-4: windows by the keys that they leave, documents packed end to end.

Both masks are read on the host, as 0-d and (B, S) arrays of the CPU, and are inputs of the compiled step. Documents
become a table of the places where they begin, with as many entries as there are documents: the kernel looks
through all of it in each program.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor, library

from minillm_core import BackendError
from minillm_cute.kernels.hopper import check_hopper

__all__ = ["attention"]

ALIGNED = 8  # elements: the kernel loads 16 bytes at a time
SELECTED = {"where": "--kernels attention=fa4", "fix": "cute.attention=false"}  # of errors


def attention(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, K, D)
    v: Tensor,  # (B, S, K, D)
    *,
    scale: float | None = None,
    window: int | Tensor | None = None,  # a tensor: 0-d, on the CPU
    documents: Tensor | None = None,  # int32 (B, S), on the CPU
) -> Tensor:
    """Return softmax(scale q k^T + mask) v (B, T, H, D): see minillm's contract of the op.

    4 B T W H D FLOPs forward, W the keys that a query sees. With :func:`torch.use_deterministic_algorithms`
    the gradient of q is summed in a fixed order, without in any.

    Raises:
        BackendError: the GPU is not a Hopper, or tokens of a document lie apart.
    """
    (B, T, H, D), S = q.shape, k.shape[1]
    scale = D**-0.5 if scale is None else scale
    changing, fixed = (window, S) if isinstance(window, Tensor) else (None, window or S)
    if documents is None:
        return _attention(q, k, v, None, None, None, changing, scale, fixed, T, S)[0]
    table = _table(documents, T, q.device)
    packed = (x.flatten(0, 1) for x in (q, k, v))
    y = _attention(*packed, *table, changing, scale, fixed, T, S)[0]
    return y.view(B, T, H, D)


@library.custom_op(
    "minillm_cute::table",
    mutates_args=(),
    schema="(Tensor documents, int queries, Device device) -> (Tensor, Tensor, Tensor)",
)
def _table(
    documents: Tensor,  # int32 (B, S) on the CPU; a negative number is padding
    queries: int,  # T, the last positions of each row
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    """Find where documents begin and end among packed queries and keys.

    Returns int32 (B S + 1,) on the device of queries, 0 to B T, and of keys, 0 to B S, of which the first
    M + 1 are used; and M, int64 () on the CPU.
    """
    if not documents.is_cpu:
        raise _refused(
            "FlashAttention-4 reads documents on the host; where mesh.context divides rows they are on the GPU",
        )
    ids = documents.numpy()
    (B, S), later, earlier = ids.shape, ids[:, 1:], ids[:, :-1]
    highest = np.maximum.accumulate(ids, axis=1)[:, :-1]  # behind padding too
    if ((later != earlier) & (later <= highest) & (later >= 0)).any():
        raise _refused(
            "FlashAttention-4 takes documents whose tokens are adjacent, and their numbers fall within a row",
        )
    begins = np.ones((B, S), dtype=bool)
    begins[:, 1:] = later != earlier
    keys = np.append(np.flatnonzero(begins), B * S)
    at = np.maximum(keys % S - (S - queries), 0)  # the place in its row among the queries
    bounds = []
    for places in (keys // S * queries + at, keys):
        padded = torch.empty(B * S + 1, dtype=torch.int32, pin_memory=device.type == "cuda")
        # filled by NumPy: torch's threads would wait for each other, milliseconds if cores are shared
        array = padded.numpy()
        array[: len(keys)], array[len(keys) :] = places, 0
        bounds.append(padded.to(device, non_blocking=True))
    return bounds[0], bounds[1], torch.tensor(len(keys) - 1)


@_table.register_fake
def _(documents: Tensor, queries: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    room = documents.numel() + 1
    bounds = [torch.empty(room, dtype=torch.int32, device=device) for _ in range(2)]
    return bounds[0], bounds[1], torch.empty((), dtype=torch.int64)


@library.custom_op(
    "minillm_cute::attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? queries, Tensor? keys, Tensor? count, "
    "Tensor? changing, float scale, int window, int longest_q, int longest_k) -> (Tensor, Tensor)",
)
def _attention(
    q: Tensor,  # (B, T, H, D), or packed (B T, H, D)
    k: Tensor,  # (B, S, K, D), or packed (B S, K, D)
    v: Tensor,
    queries: Tensor | None,  # int32 (B S + 1,), if packed
    keys: Tensor | None,  # int32 (B S + 1,)
    count: Tensor | None,  # int64 () on the CPU: M, of M + 1 entries
    changing: Tensor | None,  # () on the CPU: the window, in place of the fixed one
    scale: float,
    window: int,
    longest_q: int,
    longest_k: int,
) -> tuple[Tensor, Tensor]:
    """Compute y in q's shape, and the logarithms of the sums, float32 (B, H, T) or (H, B T)."""
    check_hopper(q.device, "FlashAttention-4 runs", **SELECTED)
    seen = _seen(changing, window, queries, keys, count, longest_q, longest_k)
    with _without_warnings():
        y, logs, *_ = _library()._flash_attn_fwd(
            *map(_loadable, (q, k, v)),
            softmax_scale=scale,
            causal=True,
            return_lse=True,
            **seen,
        )
    return y, logs


@_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tensor | None,
    keys: Tensor | None,
    count: Tensor | None,
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
    "Tensor? count, Tensor? changing, float scale, int window, int longest_q, int longest_k) "
    "-> (Tensor, Tensor, Tensor)",
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
    count: Tensor | None,
    changing: Tensor | None,
    scale: float,
    window: int,
    longest_q: int,
    longest_k: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v."""
    seen = _seen(changing, window, queries, keys, count, longest_q, longest_k)
    with _without_warnings():
        return _library()._flash_attn_bwd(
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


@cache
def _library() -> Any:
    """Import FlashAttention-4 so that it keeps compiled kernels on disk, as QuACK does, unless its variable is set.

    Else each process would compile them for about ten seconds. It reads the variable when it is imported.
    """
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    return import_module("flash_attn.cute.interface")


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, scale, window, longest_q, longest_k = inputs
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])
    ctx.numbers = scale, window, longest_q, longest_k
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, up: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return *_backward(up, *ctx.saved_tensors, *ctx.numbers), *(8 * [None])


_attention.register_autograd(_gradients, setup_context=_save)


def _seen(
    changing: Tensor | None,
    window: int,
    queries: Tensor | None,
    keys: Tensor | None,
    count: Tensor | None,
    longest_q: int,
    longest_k: int,
) -> dict[str, Any]:
    """Return FlashAttention's arguments for a window and documents."""
    width = window if changing is None else int(changing)
    left, right = (width - 1, 0) if width < longest_k else (None, None)
    seen: dict[str, Any] = {"window_size_left": left, "window_size_right": right}
    if queries is None or keys is None or count is None:
        return seen
    used = int(count) + 1
    bounds = {"cu_seqlens_q": queries[:used], "cu_seqlens_k": keys[:used]}
    return seen | bounds | {"max_seqlen_q": longest_q, "max_seqlen_k": longest_k}


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Hide a warning of CuTe that each form gives when it is compiled."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Argument .* cannot be converted to a JitArgument")
        yield


def _refused(what: str) -> BackendError:
    return BackendError(what, **SELECTED)


def _loadable(x: Tensor) -> Tensor:
    """Return x, or a copy of it if 16 bytes of a head cannot be loaded at once."""
    aligned = x.stride(-1) == 1 and all(step % ALIGNED == 0 for step in x.stride()[:-1])
    return (
        x
        if aligned and x.storage_offset() % ALIGNED == 0
        else x.clone(memory_format=torch.contiguous_format)
    )
