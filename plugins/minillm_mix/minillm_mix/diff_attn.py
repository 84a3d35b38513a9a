"""Differential attention: the difference of two softmax maps per head (arXiv:2410.05258).

    y_p = (softmax(q1 k1^T) - lambda softmax(q2 k2^T)) [v1, v2]
    lambda = exp(lq1 . lk1) - exp(lq2 . lk2) + lambda_init,   lambda_init = 0.8 - 0.6 exp(-0.3 layer)
    out_p = (1 - lambda_init) RMSNorm(y_p) * weight

Noise common to both maps cancels, as in a differential amplifier. Head p consists of the
model's heads 2p and 2p + 1: their queries and keys form the two maps, their values are concatenated to twice
the size, over which the norm is taken; parameters are the plain model's plus four vectors and a norm per
layer. lambda is one number per layer, its vectors drawn with std 0.1. Layers are counted from 0. Where
heads share key-value heads, plugins which correct y by them are refused.

The maps' products with each half of the values are four heads of the plain size, computed by the kernel
of the op ``attention``: no (T, T) array is stored, at twice the products of plain attention.
"""

from __future__ import annotations

import math
from typing import Any

from minillm_core import Layers, Module, Normal, Param, PlanError, Plugin, ones, option

__all__ = ["DiffAttn", "Difference"]


class DiffAttn(Plugin, api=1):
    """Heads in pairs: the difference of two softmax maps, with a learned factor on the second."""

    lambda_init: float | None = option(
        None,
        gt=0,
        lt=1,
        help="initial factor on the second map; none: 0.2 to 0.8, rising with depth",
    )
    layers: Layers = option(
        "all", help='layers with differential attention: "all", [0, -1], "every:2"'
    )

    def build_attention(self, attn):
        if attn.layer not in self.layers.resolve(attn.layers):
            return
        check_pairs(attn.heads, attn.kv_heads, attn.layer)
        if attn.heads != attn.kv_heads:
            # Head h of y mixes both values of its pair, not v[h // (H / K)] alone.
            why = "with grouped key-value heads, v no longer lines up with y head by head"
            attn.out.correct.close(why)
            attn.out.project_out.close(why)
        start = self.lambda_init
        attn.core(Difference, start=start_of(attn.layer) if start is None else start)


def check_pairs(heads: int, kv_heads: int, layer: int) -> None:
    """Refuse heads that do not form pairs."""
    for key, count in (("heads", heads), ("kv_heads", kv_heads)):
        if count % 2:
            raise PlanError(
                f"diff_attn pairs heads, but layer {layer} has {count}",
                where=f"model.{key}={count}",
                fix=f"an even model.{key}, or leave that layer out of diff_attn.layers",
            )


def start_of(layer: int) -> float:
    """Return lambda_init of a layer, counted from 0."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


class Difference(Module):
    """softmax(q1 k1^T) - lambda softmax(q2 k2^T), on heads 2p and 2p + 1, normalised."""

    calls = ("attention",)

    def __init__(self, geometry: Any, start: float) -> None:
        super().__init__()
        check_pairs(geometry.heads, geometry.kv_heads, geometry.layer)  # the heads of a layout
        self.start, self.eps = start, geometry.norm_eps
        self.pairs = geometry.kv_heads // 2, geometry.heads // geometry.kv_heads
        self.width = geometry.heads * geometry.head_dim
        names = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
        for name in names:
            param = Param((geometry.head_dim,), init=Normal(0.1), role="scalar", wd_mul=0.0)
            setattr(self, name, param)
        self.norm = Param((2 * geometry.head_dim,), init=ones, role="norm", wd_mul=0.0)

    def flops(self, keys: float) -> float:
        """Count a token's FLOPs, forward and backward: twice the heads of plain attention."""
        return 24 * self.width * keys

    def factor(self) -> Any:
        """Return lambda, 0-d float32."""
        ops: Any = self.ops
        first, second = (
            ops.exp(ops.sum(ops.astype(a, "float32") * ops.astype(b, "float32")))
            for a, b in ((self.lambda_q1, self.lambda_k1), (self.lambda_q2, self.lambda_k2))
        )
        return first - second + self.start

    def forward(self, q: Any, k: Any, v: Any, window: Any, documents: Any, scale: float) -> Any:
        """Attend: q (B, T, H, D), k and v (B, S, K, D) -> (B, T, H, D)."""
        ops: Any = self.ops
        (B, T, H, D), S, (P, G) = q.shape, k.shape[1], self.pairs
        # heads (pair of key-value heads, map, half of the values, query pair): 2 H of D
        q = ops.permute_dims(ops.reshape(q, (B, T, P, G, 2, D)), (0, 1, 2, 4, 3, 5))
        q = ops.reshape(ops.stack([q, q], 4), (B, T, 2 * H, D))
        k, v = (ops.reshape(x, (B, S, P, 2, D)) for x in (k, v))
        k = ops.reshape(ops.stack([k, k], 4), (B, S, 4 * P, D))
        v = ops.reshape(ops.stack([v, v], 3), (B, S, 4 * P, D))
        y = ops.attention(q, k, v, scale=scale, window=window, documents=documents)
        y = ops.reshape(y, (B, T, P, 2, 2, G, D))
        y = y[:, :, :, 0] - y[:, :, :, 1] * ops.like(self.factor(), y)  # (B, T, P, 2, G, D)
        y = ops.reshape(ops.permute_dims(y, (0, 1, 2, 4, 3, 5)), (B, T, H // 2, 2 * D))
        return ops.reshape(ops.rms_norm(y, self.norm, self.eps) * (1.0 - self.start), (B, T, H, D))
