"""The basic layers: linear, embedding, RMSNorm and SwiGLU."""

from __future__ import annotations

from typing import Any

from minillm_core.nn.init import Init, Normal, fan_in, fan_in_residual, ones
from minillm_core.nn.module import Module
from minillm_core.nn.node import ModelShape, Scope, check_dtype, check_shape
from minillm_core.nn.param import Param


class Linear(Module):
    """A linear layer: x (..., C) -> x @ weight.T (..., O), a subclass of the framework's own linear class.

    ``product`` is a plugin's claim on this leaf (FP8, LoRA): ``product(x, weight) -> (..., O)``, with
    further inputs if the caller passes a scope, as the core's attention and SwiGLU do.
    ``share`` is the fraction of tokens that pass through this layer, for the FLOP count: less than 1
    in an expert.

    Args:
        in_features: C.
        out_features: O; the weight is (O, C).
        role: the role of the weight, see :class:`Param`.
        axes: logical names of the weight's axes.
        init: the initialiser; None: a normal with std C^-1/2.
        lr_mul: factor on the learning rate.
        wd_mul: factor on the weight decay.

    ::

        self.gate = Linear(geometry.dim, geometry.heads, role="gate", init=zeros)
    """

    leaf = "linear"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        role: str,
        axes: tuple[str, str] = ("out", "in"),
        init: Init | None = None,
        lr_mul: float = 1.0,
        wd_mul: float = 1.0,
        share: float = 1.0,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.share = share
        self.weight = Param(
            (out_features, in_features),
            axes=axes,
            init=init or fan_in(in_features),
            role=role,
            lr_mul=lr_mul,
            wd_mul=wd_mul,
        )
        self.product: Any = None

    def forward(self, x: Any, scope: Scope | None = None) -> Any:
        """Multiply x (..., C) -> (..., O)."""
        if self.product is None:
            return self.ops.linear(x, self.weight)
        result = (scope or Scope({})).apply(self.product, {"x": x, "weight": self.weight})
        shape = (*x.shape[:-1], self.weight.shape[0])
        return check_dtype(self.product, check_shape(self.product, result, shape), x)


HEAD_STD = 0.02
"""Keeps the first logits near 0: the first loss is the logarithm of the vocabulary size."""


class Embedding(Module):
    """An embedding: ids int32 (B, T) -> (B, T, C)."""

    leaf = "embedding"

    def __init__(self, geometry: ModelShape, *, tied: bool) -> None:
        super().__init__()
        self.weight = Param(
            (geometry.vocab, geometry.dim),
            axes=("vocab", "dim"),
            init=Normal(HEAD_STD if tied else 1.0),
            role="embedding.token",
        )

    def forward(self, ids: Any) -> Any:
        """Look up ids int32 (B, T) -> (B, T, C)."""
        return self.ops.embedding(ids, self.weight)


def head_of(geometry: ModelShape) -> Linear:
    """Build the untied head, (V, C)."""
    return Linear(
        geometry.dim, geometry.vocab, role="head", axes=("vocab", "dim"), init=Normal(HEAD_STD)
    )


class RMSNorm(Module):
    """RMSNorm (arXiv:1910.07467): x (..., C) -> x / sqrt(mean(x^2) + eps) * weight, float32 inside."""

    def __init__(self, geometry: ModelShape) -> None:
        super().__init__()
        self.eps = geometry.norm_eps
        self.weight = Param((geometry.dim,), axes=("dim",), init=ones, role="norm", wd_mul=0.0)

    def forward(self, x: Any) -> Any:
        """Normalise x (..., C) -> (..., C)."""
        return self.ops.rms_norm(x, self.weight, self.eps)


class SwiGLU(Module):
    """SwiGLU (arXiv:2002.05202), the MLP: x (B, T, C) -> down(silu(gate(x)) * up(x)) (B, T, C)."""

    def __init__(self, geometry: ModelShape) -> None:
        super().__init__()
        dim, hidden = geometry.dim, geometry.hidden
        self.gate = Linear(dim, hidden, role="mlp.gate", axes=("hidden", "dim"))
        self.up = Linear(dim, hidden, role="mlp.up", axes=("hidden", "dim"))
        self.down = Linear(
            hidden,
            dim,
            role="mlp.down",
            axes=("dim", "hidden"),
            init=fan_in_residual(hidden, geometry.layers),
        )

    def forward(self, x: Any, scope: Scope | None = None) -> Any:
        """Apply the MLP: x (B, T, C) -> (B, T, C)."""
        return self.down(self.ops.swiglu(self.gate(x, scope), self.up(x, scope)), scope)
