"""Attention sinks: a head can attend to nothing, by a learned logit in the softmax's denominator.

    p_ij = exp(s_ij) / (exp(b_h) + sum_j exp(s_ij))         b_h learned, one per head

The weights of a query sum to less than 1. Without a sink, a head with no relevant key puts its
weight on the first token, whose value becomes small (StreamingLLM, arXiv:2309.17453). With b fixed
at 0 (``learned=false``, ``start=0``) this is "softmax-off-by-one"; gpt-oss learns b (arXiv:2508.10925).
Equal to softmax attention times sigmoid(logsumexp_j s_ij - b_h).
"""

from __future__ import annotations

from typing import Any

from minillm_core import Constant, Layers, Module, Param, Plugin, option
from minillm_mix.scores import HIDDEN, scores, summed

__all__ = ["AttnSink", "Sinks"]


class AttnSink(Plugin, api=1):
    """A learned logit per head in the softmax's denominator: a head may attend to nothing."""

    start: float = option(0.0, help="initial sink logit; 0 acts as one more key of score 0")
    learned: bool = option(
        True, help="train the logits; false: they are constant, with start 0 softmax-off-by-one"
    )
    lr_mul: float = option(1.0, gt=0, help="factor on the learning rate of the sink logits")
    layers: Layers = option("all", help='layers with sinks: "all", [0, -1], "every:2"')

    def build_attention(self, attn):
        if attn.layer in self.layers.resolve(attn.layers):
            attn.core(Sinks, start=self.start, learned=self.learned, lr_mul=self.lr_mul)


class Sinks(Module):
    """Softmax attention with a sink per head."""

    def __init__(self, geometry: Any, start: float, learned: bool, lr_mul: float) -> None:
        super().__init__()
        self.start = start
        self.sink = None
        if learned:
            self.sink = Param(
                (geometry.heads,),
                axes=("heads",),
                init=Constant(start),
                role="scalar",
                lr_mul=lr_mul,
                wd_mul=0.0,
            )

    def forward(self, q: Any, k: Any, v: Any, mask: Any, scale: float) -> Any:
        """Attend: q (B, T, H, D), k and v (B, S, K, D) -> (B, T, H, D)."""
        ops: Any = self.ops
        seen = ops.where(mask, scores(ops, q, k, scale), HIDDEN)  # float32 (B, H, T, S)
        total = ops.logsumexp(seen, -1, keepdims=True)
        sink = self.start if self.sink is None else ops.reshape(self.sink, (-1, 1, 1))
        return summed(ops, ops.exp(seen - total) * ops.sigmoid(total - sink), v)
