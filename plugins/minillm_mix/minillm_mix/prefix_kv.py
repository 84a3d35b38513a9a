"""Learned keys and values in front of every row: each query attends to them as to earlier tokens.

    y_t = softmax([q_t P_k^T, q_t K^T] / sqrt(D)) [P_v; V]        P_k, P_v (P, K, D) learned, in each layer

Trained with all other weights: persistent memory (Sukhbaatar et al., arXiv:1907.01470). Trained alone
(beside ``freeze`` and ``--init``): prefix tuning (Li and Liang, arXiv:2101.00190). The keys have no
position: they join after the rotation. They take no columns of the row and no place in the KV cache,
and neither a window nor documents hide them.
"""

from __future__ import annotations

from typing import Any

from minillm_core import Layers, Module, Normal, Param, Plugin, option
from minillm_mix.scores import HIDDEN, scores, summed

__all__ = ["PrefixKV", "PrefixedAttention"]


class PrefixKV(Plugin, api=1):
    """Every query also attends to a few learned keys and values, as in prefix tuning."""

    tokens: int = option(8, ge=1, search=(4, 16), help="learned keys and values per head and layer")
    std: float = option(0.02, gt=0, help="standard deviation of their initial values")
    lr_mul: float = option(1.0, gt=0, help="factor on their learning rate")
    layers: Layers = option("all", help='layers with a prefix: "all", [0, -1], "every:2"')

    def build_attention(self, attn):
        if attn.layer in self.layers.resolve(attn.layers):
            attn.core(PrefixedAttention, tokens=self.tokens, std=self.std, lr_mul=self.lr_mul)


class PrefixedAttention(Module):
    """Softmax attention to learned keys and values, and to those of the row."""

    def __init__(self, geometry: Any, tokens: int, std: float, lr_mul: float) -> None:
        super().__init__()
        shape = tokens, geometry.kv_heads, geometry.head_dim
        self.prefix_k, self.prefix_v = (
            Param(
                shape,
                axes=("prefix", "kv_heads", "head_dim"),
                init=Normal(std),
                role="gate",
                lr_mul=lr_mul,
                wd_mul=0.0,
            )
            for _ in range(2)
        )

    def forward(self, q: Any, k: Any, v: Any, mask: Any, scale: float) -> Any:
        """Attend: q (B, T, H, D), k and v (B, S, K, D) -> (B, T, H, D)."""
        ops: Any = self.ops
        B, P = k.shape[0], self.prefix_k.shape[0]
        keys, values = (
            ops.broadcast_to(ops.expand_dims(ops.like(one, k), 0), (B, *one.shape))
            for one in (self.prefix_k, self.prefix_v)
        )  # (B, P, K, D)
        row = ops.where(mask, scores(ops, q, k, scale), HIDDEN)  # float32 (B, H, T, S)
        seen = ops.concat([scores(ops, q, keys, scale), row], -1)  # (B, H, T, P + S)
        weights = ops.exp(seen - ops.logsumexp(seen, -1, keepdims=True))
        prefix, others = ops.split(weights, [P, k.shape[1]], -1)
        return summed(ops, prefix, values) + summed(ops, others, v)
