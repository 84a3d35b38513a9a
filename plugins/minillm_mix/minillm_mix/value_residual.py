"""Value residual, ResFormer: the first layer's values are added to those of all later ones (arXiv:2410.17897).

    v_n <- a_n v_0 + b_n v_n                                a_n = b_n = 1/2 at the start, learned

As the residual stream does for x, it gives deep layers direct access to early values, so that attention
need not carry token information through all layers. ``learned=false`` is the paper's plain form, constant
halves. The first layer's v is the one that its attention uses, including terms of other plugins such as
value embeddings. ``value_embeds.mix=lambdas``, which weighs a layer's own values too, is refused beside it.
"""

from __future__ import annotations

import re
from typing import Any

from minillm_core import Constant, Layers, Module, Param, PlanError, Plugin, option

__all__ = ["Mixed", "ValueResidual"]

TAP = "value_residual_source"

RESCALED = re.compile(r"layers\.(\d+)\.attention\.v_terms\.\w+\.l0")
"""The weight by which ``value_embeds.mix=lambdas`` multiplies a layer's own values."""


class ValueResidual(Plugin, api=1):
    """Values of the first layer are mixed into those of all later ones, by learned weights."""

    source: int = option(0, ge=0, help="layer whose values later layers add")
    first: float = option(0.5, help="initial weight of the source's values")
    own: float = option(0.5, help="initial weight of a layer's own values")
    learned: bool = option(True, help="train both weights, per layer; false: they are constant")
    lr_mul: float = option(1.0, gt=0, help="factor on the learning rate of the weights")
    layers: Layers = option(
        "all", help='later layers that add the source\'s values: "all", [1, -1], "every:2"'
    )

    def build_attention(self, attn):
        if attn.layer > self.source and attn.layer in self.layers.resolve(attn.layers):
            attn.v(
                Mixed,
                reads={"source": TAP},
                first=self.first,
                own=self.own,
                learned=self.learned,
                lr_mul=self.lr_mul,
            )

    def optimizer_factory(self, optimizer):
        """Refuse another weight of a layer's own values: of a v + b v + c v, each term subtracts one v."""
        if not self.learned and self.own == 1:
            return
        places = [RESCALED.fullmatch(name) for name in optimizer.parameters]
        held = {int(place[1]): place[0] for place in places if place}
        count = 1 + max(
            int(n.split(".")[1]) for n in optimizer.parameters if n.startswith("layers.")
        )
        for layer in self.layers.resolve(count):
            if layer > self.source and layer in held:
                owner = optimizer.parameters[held[layer]].owner
                raise PlanError(
                    f"both {owner}.mix=lambdas and value_residual weigh the values of layer {layer}, "
                    "and two weights of 1/2 would add up to 0",
                    where=f"layers.{layer}.attention.v",
                    fix=f"leave out {owner}.mix (gates), or value_residual.own=1 value_residual.learned=false, "
                    "or leave layers with a table out of value_residual.layers",
                )

    def build_model(self, model):
        last = model.layers - 1
        if self.source >= last:
            raise PlanError(
                f"value_residual.source={self.source}: no layer of {model.layers} comes after it",
                where=f"model.layers={model.layers}",
                fix=f"value_residual.source from 0 to {last - 1}"
                if last
                else "model.layers=2 or more",
            )
        if max(self.layers.resolve(model.layers)) <= self.source:
            raise PlanError(
                f"value_residual.layers={self.layers} has no layer after "
                f"value_residual.source={self.source}",
                where=f"model.layers={model.layers}",
                fix=f"name layers from {self.source + 1} to {last} in value_residual.layers",
            )
        model.tap(f"layers.{self.source}.attention.v", name=TAP)


class Mixed(Module):
    """v and source (B, T, K, D) -> the term added to v, giving first source + own v."""

    def __init__(self, first: float, own: float, learned: bool, lr_mul: float) -> None:
        super().__init__()
        self.first, self.own = first, own
        if learned:
            self.first = Param((1,), init=Constant(first), role="scalar", lr_mul=lr_mul, wd_mul=0.0)
            self.own = Param((1,), init=Constant(own), role="scalar", lr_mul=lr_mul, wd_mul=0.0)

    def forward(self, v: Any, source: Any) -> Any:
        """Return (B, T, K, D)."""
        first: Any = self.first  # an array at this point, if learned
        own: Any = self.own
        return first * source + (own - 1.0) * v
