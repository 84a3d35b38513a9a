"""ReLU squared (Primer, So et al., arXiv:2109.08668; modded-nanogpt, record 5).

    y = relu(x Wup)^2 Wdown

Two matrices instead of SwiGLU's three. They are 1.5 times as wide as ``model.hidden``, so that both
MLPs have the same parameters and FLOPs: 4 x the model's width where
``model.hidden`` is 8/3 of it (preset gpt2-124m: 3072 of 768, as in the records).
"""

from __future__ import annotations

from typing import Any

from minillm_core import Layers, Linear, Module, Normal, Plugin, option

__all__ = ["MLP", "ReLU2"]


class ReLU2(Plugin, api=1):
    """The MLP is two matrices around a squared ReLU, of the plain MLP's size and cost."""

    hidden: int | None = option(None, ge=1, help="hidden width; none: 3/2 of model.hidden")
    down_lr_mul: float = option(
        1.0,
        gt=0,
        search=(1.0, 2.0),
        help="factor on the learning rate of Wdown (2 in the later records)",
    )
    layers: Layers = option("all", help='layers with this MLP: "all", [0, -1], "every:2"')

    def build_model(self, model):
        hidden = self.hidden or 3 * model.hidden // 2
        for layer in self.layers.resolve(model.layers):
            model.mlp(layer, MLP, hidden=hidden, down_lr_mul=self.down_lr_mul)


class MLP(Module):
    """x (B, T, C) -> relu(x Wup)^2 Wdown (B, T, C)."""

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
