"""ReLU squared MLP whose activation is part of its matrix products, by QuACK, on Hopper GPUs.

    y = relu(x Wup^T)^2 Wdown^T

replaces `relu2`, with its parameters, sizes and initial values. Between the products of `relu2` two passes
over arrays of (tokens, hidden) compute the activation and its slope; here the products write both.
(modded-nanogpt, records of 2026-01-10 and 2026-06-11: the up-projection with ReLU squared as one kernel.)
"""

from __future__ import annotations

from typing import Any

from minillm_core import Layers, Linear, Module, Normal, Plugin, option
from minillm_cute.products import MULTIPLE, check_sizes, check_unclaimed

__all__ = ["MLP", "FusedReLU2"]

INSTEAD = "relu2 in place of fused_relu2"


class FusedReLU2(
    Plugin,
    api=1,
    backends=("torch",),
    devices=("cuda",),
    capability="==9.0",
    requires=("quack-kernels==0.6.5",),
):
    """The MLP of relu2 with its activation in the matrix products, by QuACK, on Hopper GPUs."""

    hidden: int | None = option(
        None, ge=1, help="hidden width; none: 3/2 of model.hidden, rounded up to a multiple of 8"
    )
    down_lr_mul: float = option(1.0, gt=0, help="factor on the learning rate of Wdown")
    layers: Layers = option("all", help='layers with this MLP: "all", [0, -1], "every:2"')

    def build_model(self, model: Any) -> None:
        hidden = self.hidden or -(-3 * model.hidden // (2 * MULTIPLE)) * MULTIPLE
        check_sizes({"model.dim": model.dim, "fused_relu2.hidden": hidden}, INSTEAD)
        for layer in self.layers.resolve(model.layers):
            model.mlp(layer, MLP, hidden=hidden, down_lr_mul=self.down_lr_mul)


class PlainMLP(Module):
    """x (B, T, C) -> relu(x Wup^T)^2 Wdown^T (B, T, C), with products and activation apart."""

    def __init__(self, geometry: Any, hidden: int, down_lr_mul: float) -> None:
        super().__init__()
        self.up = Linear(geometry.dim, hidden, role="mlp.up", axes=("hidden", "dim"))
        self.down = Linear(
            hidden,
            geometry.dim,
            role="mlp.down",
            axes=("dim", "hidden"),
            init=Normal((hidden * 2 * geometry.layers) ** -0.5),  # as the plain MLP's
            lr_mul=down_lr_mul,
        )

    def forward(self, x: Any) -> Any:
        """x (B, T, C) -> (B, T, C)."""
        h = self.ops.relu(self.up(x))  # (B, T, hidden)
        return self.down(self.ops.square(h))


class MLP(PlainMLP):
    """The MLP with its activation in the matrix products."""

    written_as = PlainMLP  # a model directory needs no QuACK
    own_products = True  # in training, those of its linear layers, which are not called

    def forward(self, x: Any) -> Any:
        """x (B, T, C) -> (B, T, C).

        Raises:
            PlanError: a plugin has claimed a product of the MLP, which is not called here.
        """
        check_unclaimed("fused_relu2", (self.up, self.down), INSTEAD)
        if hasattr(x, "is_cuda"):  # an array of torch, which MLX reads runs without
            from minillm_cute.kernels.mlp import relu2_mlp, served

            if served(x, "fused_relu2", INSTEAD):
                up: Any = self.up.weight
                down: Any = self.down.weight
                return relu2_mlp(x, up, down)
        return super().forward(x)
