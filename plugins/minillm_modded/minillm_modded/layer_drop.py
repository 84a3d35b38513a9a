"""Some layers have no attention, others no MLP (modded-nanogpt, records 30 and 35).

    x <- x + MLP(norm x)              in a layer without attention
    x <- x + attention(norm x)        in a layer without an MLP

Record 30 left out the first MLP, record 35 the first attention, which took no part in copying and
whose passing of neighbours ``smear`` does for less. Record 11 had left out the attention in the middle,
where a U-net turns (`unet_skip.attention`). Parameters and multiplications go with the sublayer, and
may be spent on another layer; the model is smaller by that much otherwise.

Plugins that are in "all" layers are in all that are left. One that lists a layer whose sublayer is left
out is refused.
"""

from __future__ import annotations

from minillm_core import Layers, PlanError, Plugin, option

__all__ = ["LayerDrop"]


class LayerDrop(Plugin, api=1):
    """The attention of the first layer, or any others' attention and MLPs, is left out."""

    attention: Layers | None = option(
        [0], help="layers without attention, such as [0, 6]; none: all have one"
    )
    mlp: Layers | None = option(None, help="layers without an MLP; none: all have one")

    def build_model(self, model):
        left = {
            name: set(layers.resolve(model.layers)) if layers else set()
            for name, layers in (("attention", self.attention), ("mlp", self.mlp))
        }
        if not left["attention"] | left["mlp"]:
            self._refuse("leaves nothing out", "layer_drop.attention=[0]")
        if empty := sorted(left["attention"] & left["mlp"]):
            self._refuse(f"leaves nothing of layer {empty[0]}", f"model.layers={model.layers - 1}")
        if len(left["attention"]) == model.layers:
            self._refuse("leaves no attention: no token would see another", "fewer layers")
        for layer in sorted(left["attention"]):
            model.attention(layer, None)
        for layer in sorted(left["mlp"]):
            model.mlp(layer, None)

    def _refuse(self, what: str, fix: str) -> None:
        given = (f"layer_drop.{name}={value}" for name, value in self if value)
        fix = f"{fix}, or leave layer_drop out"
        raise PlanError(f"layer_drop {what}", where=" ".join(given) or "layer_drop", fix=fix)
