"""The ops on MLX: array functions as methods, kernels as attributes filled from the choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from minillm_core.backends.mlx.arrays import MLXArrays
from minillm_core.backends.mlx.kernels import attention, loss, norm, rotary
from minillm_core.ops.form import LossForm

__all__ = ["MLXOps", "embedding", "linear", "logits", "swiglu"]

Kernel = Callable[..., Any]


def linear(x: mx.array, weight: mx.array) -> mx.array:
    """X weight^T: x (..., C), weight (O, C) -> (..., O)."""
    return x @ weight.T


def embedding(ids: mx.array, weight: mx.array) -> mx.array:
    """weight[ids]: ids int32 (...), weight (V, C) -> (..., C). Ids are not checked here."""
    return weight[ids]


def logits(hidden: mx.array, weight: mx.array, form: LossForm) -> mx.array:
    """The head's logits where they are wanted themselves: (B, C), (V, C) -> float32 (B, V)."""
    return form.logits(mx, (hidden @ weight.T).astype(mx.float32))


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) * up."""
    return MLXArrays.silu(gate) * up


class MLXOps(MLXArrays):
    """What model code calls ``self.ops`` on MLX.

    Kernels are plain attributes, so that a trace reads them without a lookup.

    Args:
        kernels: op -> function, from :func:`minillm_core.ops.load`; ops of plugins included. An
            op that is missing gets the core's usual kernel.
    """

    name = "mlx"

    linear: Kernel
    embedding: Kernel
    rms_norm: Kernel
    rotate: Kernel
    attention: Kernel
    swiglu: Kernel
    logits: Kernel
    linear_cross_entropy: Kernel

    def __init__(self, kernels: Mapping[str, Kernel] | None = None) -> None:
        usual = {
            "linear": linear,
            "embedding": embedding,
            "rms_norm": norm.fused,
            "rotate": rotary.from_table,
            "attention": attention.sdpa,
            "swiglu": swiglu,
            "logits": logits,
            "linear_cross_entropy": loss.dense,
        }
        for op, kernel in {**usual, **(kernels or {})}.items():
            setattr(self, op, kernel)
