"""Biases of queries, keys and values, as in Qwen2 (arXiv:2407.10671) and Qwen2.5.

    q <- x Wq + bq,  k <- x Wk + bk,  v <- x Wv + bv

The other projections have none. Biases start at 0 and have no weight decay.
"""

from __future__ import annotations

from typing import Any

from minillm_core import Module, Param, Plugin, zeros

__all__ = ["QKBias", "QkvBias", "VBias"]


class QkvBias(Plugin, api=1, export="qwen2", identity_at_init=True):
    """Queries, keys and values have biases, as Qwen2's do."""

    def build_attention(self, attn):
        attn.qk.project(QKBias)
        attn.v(VBias)


class QKBias(Module):
    """q (B, T, H, D), k (B, T, K, D) -> both plus a bias per head and feature."""

    def __init__(self, geometry: Any) -> None:
        super().__init__()
        self.head_dim = geometry.head_dim
        self.q_bias = bias(geometry.heads * geometry.head_dim, "heads")
        self.k_bias = bias(geometry.kv_heads * geometry.head_dim, "kv_heads")

    def forward(self, q: Any, k: Any) -> Any:
        """q (B, T, H, D), k (B, T, K, D) -> (q, k)."""
        heads = (-1, self.head_dim)
        return q + self.ops.reshape(self.q_bias, heads), k + self.ops.reshape(self.k_bias, heads)


class VBias(Module):
    """v (B, T, K, D) -> the bias to add to it, (B, T, K, D)."""

    def __init__(self, geometry: Any) -> None:
        super().__init__()
        self.head_dim = geometry.head_dim
        self.v_bias = bias(geometry.kv_heads * geometry.head_dim, "kv_heads")

    def forward(self, v: Any) -> Any:
        """v (B, T, K, D) -> (B, T, K, D)."""
        return self.ops.broadcast_to(self.ops.reshape(self.v_bias, (-1, self.head_dim)), v.shape)


def bias(features: int, axis: str) -> Param:
    """Declare a bias (features,), zeros at the start."""
    return Param((features,), axes=(axis,), init=zeros, role="bias", wd_mul=0.0)
