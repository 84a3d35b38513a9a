"""RMSNorm and SwiGLU whose results autograd, and the partitioner of a compiled step, compute again instead of keeping."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = ["rms_norm", "swiglu"]


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Normalise x (..., C): see minillm's contract of the op. Keeps x for the backward pass."""
    weight = None if weight is None else weight.to(x.dtype)
    if not torch.is_grad_enabled():
        return _rms_norm(x, weight, eps)
    return checkpoint(_rms_norm, x, weight, eps, use_reentrant=False, preserve_rng_state=False)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up: see minillm's contract of the op. Keeps gate and up for the backward pass."""
    if not torch.is_grad_enabled():
        return _swiglu(gate, up)
    return checkpoint(_swiglu, gate, up, use_reentrant=False, preserve_rng_state=False)


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up
