"""RMSNorm on torch: the fused function, and the composed form it is compared with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["composed", "fused"]


def fused(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """torch's own, float32 inside: reads and writes x (..., C) once."""
    weight = None if weight is None else weight.to(x.dtype)  # mixed dtypes are not fused
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def composed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The formula in float32."""
    wide = x.float() if x.dtype != torch.float64 else x
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight).to(x.dtype)
