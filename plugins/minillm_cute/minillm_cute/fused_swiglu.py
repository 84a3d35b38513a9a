"""SwiGLU MLP whose activation is part of its matrix products, by QuACK, on Hopper GPUs.

    y = (silu(x Wgate^T) * x Wup^T) Wdown^T

is the plain MLP (arXiv:2002.05202), with its parameters, sizes and initial values. Between its products two
passes over arrays of (tokens, hidden) compute the activation and its slopes; here the products write both, and
the activation is computed again in the backward pass: a third of the MLP's arrays is not kept.
"""

from __future__ import annotations

from typing import Any

from minillm_core import Layers, Linear, Module, Normal, Plugin, option
from minillm_cute.products import check_sizes, check_unclaimed

__all__ = ["MLP", "FusedSwiGLU"]

INSTEAD = "the plain MLP, without fused_swiglu"


class FusedSwiGLU(
    Plugin,
    api=1,
    backends=("torch",),
    devices=("cuda",),
    capability="==9.0",
    requires=("quack-kernels==0.6.5",),
    export="llama",
):
    """The plain MLP with its activation in the matrix products, by QuACK, on Hopper GPUs."""

    layers: Layers = option("all", help='layers with this MLP: "all", [0, -1], "every:2"')

    def build_model(self, model: Any) -> None:
        check_sizes({"model.dim": model.dim, "model.hidden": model.hidden}, INSTEAD)
        for layer in self.layers.resolve(model.layers):
            model.mlp(layer, MLP, hidden=model.hidden)


class PlainMLP(Module):
    """x (B, T, C) -> (silu(x Wgate^T) * x Wup^T) Wdown^T (B, T, C), with products and activation apart."""

    def __init__(self, geometry: Any, hidden: int) -> None:
        super().__init__()
        self.gate = Linear(geometry.dim, hidden, role="mlp.gate", axes=("hidden", "dim"))
        self.up = Linear(geometry.dim, hidden, role="mlp.up", axes=("hidden", "dim"))
        self.down = Linear(
            hidden,
            geometry.dim,
            role="mlp.down",
            axes=("dim", "hidden"),
            init=Normal((hidden * 2 * geometry.layers) ** -0.5),
        )

    def forward(self, x: Any) -> Any:
        """x (B, T, C) -> (B, T, C)."""
        return self.down(self.ops.swiglu(self.gate(x), self.up(x)))


class MLP(PlainMLP):
    """The MLP with its activation in the matrix products."""

    written_as = PlainMLP  # a model directory needs no QuACK
    own_products = True  # in training, those of its linear layers, which are not called

    def forward(self, x: Any) -> Any:
        """x (B, T, C) -> (B, T, C).

        Raises:
            PlanError: a plugin has claimed a product of the MLP, which is not called here.
        """
        check_unclaimed("fused_swiglu", (self.gate, self.up, self.down), INSTEAD)
        if hasattr(x, "is_cuda"):  # an array of torch, which MLX reads runs without
            from minillm_cute.kernels.mlp import served, swiglu_mlp

            if served(x, "fused_swiglu", INSTEAD):
                weights: Any = self.gate.weight, self.up.weight, self.down.weight
                return swiglu_mlp(x, *weights)
        return super().forward(x)
