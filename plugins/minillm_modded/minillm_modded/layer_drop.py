"""Layers without attention or without an MLP (modded-nanogpt, records 30 and 35).

    x <- x + MLP(norm x)              in a layer without attention
    x <- x + attention(norm x)        in a layer without an MLP

Record 30 removed the first MLP, record 35 the first attention, which was not involved in copying and
whose mixing of neighbouring tokens ``smear`` does at lower cost. Record 11 had removed the attention in
the middle, at the turn of a U-net (`unet_skip.attention`). The sublayer's parameters and FLOPs are saved
and can be spent on another layer.

Plugins applied to "all" layers apply to all remaining ones. A plugin that lists a layer whose sublayer
is removed is refused.
"""

from __future__ import annotations

from minillm_core import Layers, PlanError, Plugin, option

__all__ = ["LayerDrop"]


class LayerDrop(Plugin, api=1):
    """A model without the first layer's attention, or without attention and MLPs of layers that you name."""

    attention: Layers | None = option(
        [0], help="layers without attention, such as [0, 6]; none: no layer"
    )
    mlp: Layers | None = option(None, help="layers without an MLP; none: no layer")

    def build_model(self, model):
        left = {
            name: set(layers.resolve(model.layers)) if layers else set()
            for name, layers in (("attention", self.attention), ("mlp", self.mlp))
        }
        if not left["attention"] | left["mlp"]:
            self._refuse("leaves nothing out", "layer_drop.attention=[0]")
        if len(left["attention"]) == model.layers:
            fewer = "list fewer layers in layer_drop.attention"
            fix = fewer if model.layers > 1 else "layer_drop.attention=[0] model.layers=2 or more"
            self._refuse("leaves no attention: no token would see another", fix)
        if empty := sorted(left["attention"] & left["mlp"]):
            rest = ",".join(str(layer) for layer in sorted(left["mlp"] - left["attention"]))
            fix = f"layer_drop.mlp=[{rest}]" if rest else "layer_drop.mlp=none"
            self._refuse(f"leaves nothing of layer {empty[0]}", fix)
        for layer in sorted(left["attention"]):
            model.attention(layer, None)
        for layer in sorted(left["mlp"]):
            model.mlp(layer, None)

    def _refuse(self, what: str, fix: str) -> None:
        given = (f"layer_drop.{name}={value}" for name, value in self if value)
        fix = f"{fix}, or leave layer_drop out"
        raise PlanError(f"layer_drop {what}", where=" ".join(given) or "layer_drop", fix=fix)
