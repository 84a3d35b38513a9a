"""Forgetting attention, FoX: scores decay by learned gates between key and query (arXiv:2503.02130).

    f_t = sigmoid(w_h . x_t + b_h)                          a gate per token and head
    p_ij ~ exp(s_ij + sum_{l = j+1}^{i} log f_l)

The forget gate of recurrent models in softmax attention: tokens before a closed gate are forgotten,
separately for each head. The decay encodes positions, so that the paper's model has
no RoPE; ``rope=true`` keeps it. The sum is c_i - c_j of the cumulative c_t = log f_1 + ... +
log f_t, in float32: the KV cache has one more number c per token and head.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minillm_core import Constant, Layers, Linear, Module, Param, Plugin, option
from minillm_mix.scores import HIDDEN, scores, summed

__all__ = ["Forgetting", "ForgettingAttn"]


class ForgettingAttn(Plugin, api=1):
    """Attention scores decay by learned gates, per token and head, from key to query; no RoPE."""

    bias: float = option(
        0.0,
        search=(0.0, 2.0, 5.0),
        help="initial gate bias b; 0: gates start at 1/2, 5: nearly open, little is forgotten",
    )
    rope: bool = option(False, help="keep rotary positions, which the paper's model does not have")
    lr_mul: float = option(1.0, gt=0, help="factor on the learning rate of the gates")
    layers: Layers = option("all", help='layers with forget gates: "all", [0, -1], "every:2"')

    def build_attention(self, attn):
        if attn.layer not in self.layers.resolve(attn.layers):
            return
        attn.core(Forgetting, bias=self.bias, lr_mul=self.lr_mul)
        if not self.rope:
            attn.rope.frequencies(at_rest)
            attn.rope.scaling(
                as_they_are
            )  # prevents other plugins from rescaling unused frequencies


def at_rest(head_dim: int) -> np.ndarray:
    """Return zero frequencies float64 (D/2,): nothing is rotated."""
    return np.zeros(head_dim // 2)


def as_they_are(frequencies: np.ndarray) -> np.ndarray:
    """Return the frequencies float64 (D/2,) unchanged."""
    return frequencies


class Forgetting(Module):
    """Softmax attention with scores that decay by the gates between key and query."""

    keeps = ("faded",)

    def __init__(self, geometry: Any, bias: float, lr_mul: float) -> None:
        super().__init__()
        heads = geometry.heads
        self.gate = Linear(geometry.dim, heads, role="gate", axes=("heads", "dim"), lr_mul=lr_mul)
        self.bias = Param(
            (heads,), axes=("heads",), init=Constant(bias), role="gate", lr_mul=lr_mul, wd_mul=0.0
        )

    def forward(
        self, q: Any, k: Any, v: Any, x: Any, mask: Any, scale: float, faded: Any
    ) -> tuple[Any, Any]:
        """Attend: q (B, T, H, D), k, v (B, S, K, D), faded (B, S - T, H) or None -> y, c (B, T, H)."""
        ops: Any = self.ops
        opened = ops.astype(self.gate(x), "float32") + ops.astype(self.bias, "float32")
        new = cumulative(ops, log_sigmoid(ops, opened))  # (B, T, H)
        whole = new
        if faded is not None:
            new = new + faded[:, -1:]
            whole = ops.concat([faded, new], 1)
        of_query, of_key = (ops.permute_dims(c, (0, 2, 1)) for c in (new, whole))
        faint = scores(ops, q, k, scale) + of_query[..., None] - of_key[:, :, None]  # (B, H, T, S)
        seen = ops.where(mask, faint, HIDDEN)
        weights = ops.exp(seen - ops.logsumexp(seen, -1, keepdims=True))
        return summed(ops, weights, v), new


def log_sigmoid(ops: Any, x: Any) -> Any:
    """Compute log sigmoid(x), exact also for large negative x."""
    least = ops.minimum(x, 0.0)
    return least - ops.log(1.0 + ops.exp(least - ops.maximum(x, 0.0)))  # exp(-|x|)


def cumulative(ops: Any, x: Any) -> Any:
    """Compute the cumulative sum of x (B, T, ...) along T, in log2 T additions."""
    step = 1
    while step < x.shape[1]:
        x = x + ops.concat([ops.zeros_like(x[:, :step]), x[:, :-step]], 1)
        step *= 2
    return x
