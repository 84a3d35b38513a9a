"""The ops on torch: the ops object, with the array functions and the chosen kernels; and the usual kernels.

The loss is in loss.py, block-sparse attention in blocks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm_core.backends.torch import loss
from minillm_core.backends.torch.arrays import TorchArrays, linear
from minillm_core.backends.torch.compiling import constant_result
from minillm_core.ops.arrays import visible
from minillm_core.ops.contract import Rotary
from minillm_core.ops.form import LossForm


class TorchOps(TorchArrays):
    """The object that model code calls ``self.ops``, on torch.

    Args:
        kernels: op -> function, from :func:`minillm_core.ops.load`; ops of plugins included. An
            op that is missing gets the core's usual kernel.
        device: where zeros, ones and arange are created.
    """

    name = "torch"

    def __init__(
        self,
        kernels: Mapping[str, Callable[..., Any]] | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(device)
        plain = (linear, embedding, rotate, swiglu, logits, gram, loss.token_losses)
        usual = {kernel.__name__: kernel for kernel in plain}
        usual |= {"rms_norm": rms_norm_fused, "attention": sdpa, "linear_cross_entropy": loss.dense}
        vars(self).update(usual | dict(kernels or {}))


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Look up weight[ids]: ids int32 (...), weight (V, C) -> (..., C)."""
    return F.embedding(ids, weight)


def logits(hidden: Tensor, weight: Tensor, form: LossForm) -> Tensor:
    """Compute the head's logits, for the next token: (B, C), (V, C) -> float32 (B, V)."""
    return form.logits(torch, linear(hidden, weight).float())


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up."""
    return F.silu(gate) * up


def gram(x: Tensor, alpha: float = 1.0, beta: float = 0.0, gamma: float = 0.0) -> Tensor:
    """Compute alpha x x^T + beta x + gamma I: (N, R, C) -> (N, R, R)."""
    x = x.detach()
    made = alpha * (x @ x.mT) + (beta * x if beta else 0.0)
    wide = torch.promote_types(x.dtype, torch.float32)  # gamma by itself is not rounded
    identity = torch.eye(x.shape[-2], dtype=wide, device=x.device)
    return (made + gamma * identity).to(x.dtype) if gamma else made


def rms_norm_fused(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Call torch's fused RMSNorm, float32 inside: reads and writes x (..., C) once."""
    weight = None if weight is None else weight.to(x.dtype)  # mixed dtypes are not fused
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rms_norm_composed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Compute RMSNorm from array functions, in float32."""
    wide = x.float() if x.dtype != torch.float64 else x
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight).to(x.dtype)


def rotate(q: Tensor, k: Tensor, table: Rotary) -> tuple[Tensor, Tensor]:
    """Rotate q (B, T, H, D) and k (B, T, K, D) by the angles of their positions.

    Memory-bound: reads and writes B T (H + K) D elements.
    """
    if table.positions is None:
        cos, sin = (x.narrow(0, 0, q.shape[1]) for x in (table.cos, table.sin))
    else:
        cos, sin = table.cos[table.positions], table.sin[table.positions]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # (T, 1, D/2) or (B, T, 1, D/2)
    return _turned(q, cos, sin), _turned(k, cos, sin)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)  # float32 from here by promotion with the table
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def sdpa(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, K, D)
    v: Tensor,  # (B, S, K, D)
    *,
    scale: float | None = None,
    window: int | Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Call torch's fused kernels: flash for plain causal attention, memory-efficient or math with a mask.

    Plain causal: 2 B T^2 H D FLOPs forward and no T^2 memory. With a mask: twice the FLOPs, and
    T S (window) or B T S (documents) bytes for the mask. T < S (decoding) needs a mask of T S bytes on
    a CPU, and none on a GPU in half precision.
    """
    queries, keys = q.shape[1], k.shape[1]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H or K, T or S, D)
    grouped = q.shape[1] != k.shape[1]
    window = None if isinstance(window, int) and window >= keys else window
    if window is None and documents is None and queries in (1, keys):
        # torch's is_causal is aligned upper-left: correct if T = S; a single last query sees every key.
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=queries == keys, scale=scale, enable_gqa=grouped
        )
    elif window is None and documents is None and queries >= 128 and _flash_takes(q):
        # Its causal mask is aligned lower-right; torch's public API for that cannot be compiled. The few
        # queries of a decoding step use a mask, which is small.
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        y = flash(q, k, v, is_causal=True, scale=scale)[0]
    else:
        if grouped:  # only the math kernel supports a mask together with grouped heads
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        mask = _visible(queries, keys, window, documents, q.device)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return y.transpose(1, 2)


def _flash_takes(q: Tensor) -> bool:
    """Return whether FlashAttention supports queries like these, (B, H, T, D), on their device."""
    served = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0
    return q.is_cuda and served and q.shape[-1] <= 256 and _has_flash(str(q.device))


@constant_result
def _has_flash(device: str) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def attention_composed(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, K, D)
    v: Tensor,  # (B, S, K, D)
    *,
    scale: float | None = None,
    window: int | Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Compute attention from array functions, softmax in float32; 4 B H T S + 2 B H T S bytes and up."""
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
    j = torch.arange(keys, device=device)
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - j
    return visible(distance, window, documents)
