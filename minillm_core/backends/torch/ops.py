"""The ops on torch: array functions as methods, kernels as attributes filled from the choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm_core.backends.torch.arrays import TorchArrays
from minillm_core.backends.torch.kernels import attention, loss, norm, rotary
from minillm_core.ops.form import LossForm

__all__ = ["TorchOps", "embedding", "linear", "logits", "swiglu"]

Kernel = Callable[..., Any]


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """X weight^T: x (..., C), weight (O, C) -> (..., O)."""
    return F.linear(x, weight)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """weight[ids]: ids int32 (...), weight (V, C) -> (..., C)."""
    return F.embedding(ids, weight)


def logits(hidden: Tensor, weight: Tensor, form: LossForm) -> Tensor:
    """The head's logits where they are wanted themselves: (B, C), (V, C) -> float32 (B, V)."""
    return form.logits(torch, F.linear(hidden, weight).float())


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


class TorchOps(TorchArrays):
    """What model code calls ``self.ops`` on torch.

    Kernels are plain attributes, so that a trace reads them without a lookup.

    Args:
        kernels: op -> function, from :func:`minillm_core.ops.load`; ops of plugins included. An
            op that is missing gets the core's usual kernel.
        device: where zeros, ones and arange are made.
    """

    name = "torch"

    linear: Kernel
    embedding: Kernel
    rms_norm: Kernel
    rotate: Kernel
    attention: Kernel
    swiglu: Kernel
    logits: Kernel
    linear_cross_entropy: Kernel

    def __init__(
        self, kernels: Mapping[str, Kernel] | None = None, *, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(device)
        usual = {
            "linear": linear,
            "embedding": embedding,
            "rms_norm": norm.fused,
            "rotate": rotary.rotate,
            "attention": attention.sdpa,
            "swiglu": swiglu,
            "logits": logits,
            "linear_cross_entropy": loss.dense,
        }
        for op, kernel in {**usual, **(kernels or {})}.items():
            setattr(self, op, kernel)
