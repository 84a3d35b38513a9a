"""Layer-wise gradient clipping: the gradients of a layer have at most the joint norm ``most``.

    g <- g min(1, most / |G|)              | |: Euclidean, of all gradients G of the parameter's layer

A layer is a block, with its attention, MLP and norms; the embedding, the head and every parameter outside the
blocks are layers of their own. If one layer's gradients spike, the others are unchanged, unlike under clipping
by the global norm (``train.clip``; it is applied first, 0 disables it). It applies to the gradients of every rule.
"""

from __future__ import annotations

from typing import Any

from minillm_core import Plugin, option, stage

__all__ = ["LayerClip", "clip_layer"]

EPSILON = 1e-6  # added to a norm, as in torch's clip_grad_norm_


class LayerClip(Plugin, api=1):
    """The gradients of each layer are clipped by their joint norm."""

    most: float = option(
        0.5, gt=0, search=(0.25, 0.5, 1.0), help="maximum joint norm of a layer's gradients"
    )
    rules: tuple[str, ...] = option(
        ("*",), min_length=1, help='update rules it applies to; "*": all; ["muon"] leaves out AdamW'
    )

    def optimizer_factory(self, optimizer):
        for rule in self.rules:
            optimizer.gradient(rule, stage(clip_layer, most=self.most), before=("agc",))


def clip_layer(
    ops: Any,
    update: Any,
    param: Any,
    state: dict[str, Any],
    *,
    most: float,
    layer_grad_norm: Any,
) -> Any:
    """Clip the update (...) by its layer's gradient norm; layer_grad_norm 0-d or (N, 1, ...)."""
    return update * ops.minimum(most / (layer_grad_norm + EPSILON), 1.0), state
