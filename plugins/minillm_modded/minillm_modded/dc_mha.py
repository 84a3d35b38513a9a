"""DC-MHA, dynamically composable attention: scores and weights are mixed across heads (arXiv:2405.08553).

    A'_h = A_h + sum over g of B_gh A_g + sum over r of w2_rh (sum over g of w1_rg A_g) + tanh(d_h) A_h + the same by key
    y    = compose(softmax(compose(scale q k^T)))  v

A_h is (T, S), the scores of head h before the softmax and its weights after it; each has its own compose
module. w1, w2 (rank x heads) and d are functions of the query's token, and again of the key's: w1 and w2 from
GELU(x W), w1 normalised over the heads, d = x W_d. So heads can share attention patterns or values
dynamically, per token. B, w2 and d start at 0, so that the model starts unchanged (the
paper draws them small). GELU is the tanh approximation.

Keys' w1, w2 and d are cached in decoding, beside keys and values. No fused kernel computes
this: (B, H, T, S) numbers are stored several times, so that it suits few layers, or windows
(modded-nanogpt, record 85: one layer of 11, weights only). A layer with paired heads has two positions per
token, and is refused.
"""

from __future__ import annotations

from typing import Any

from minillm_core import Layers, Linear, Module, Param, Plugin, option, zeros
from minillm_modded.mudd import gelu

__all__ = ["DCMHA", "Composed", "Weights"]

HIDDEN = -1e30
"""The score of a key that a query does not see: finite, so that no gradient is NaN."""


class DCMHA(Plugin, api=1):
    """Scores and weights of attention are composed across heads, by token."""

    rank: int = option(2, ge=1, help="rank of the token-dependent composition")
    hidden: int | None = option(
        None, ge=1, help="hidden width of the compose modules (W); none: 4 per head"
    )
    lr_mul: float = option(1.0, gt=0, help="factor on the learning rate of the compose modules")
    layers: Layers = option("all", help='layers with composed heads: "all", [0, -1], "every:2"')

    def build_attention(self, attn):
        if attn.layer in self.layers.resolve(attn.layers):
            attn.core(Composed, rank=self.rank, hidden=self.hidden, lr_mul=self.lr_mul)


class Composed(Module):
    """Softmax attention whose scores and weights are composed across heads."""

    keeps = ("key_scores", "key_weights")

    def __init__(self, geometry: Any, rank: int, hidden: int | None, lr_mul: float) -> None:
        super().__init__()
        heads = geometry.heads
        self.count, self.heads, self.rank = heads * geometry.head_dim, heads, rank
        hidden = hidden or 4 * heads
        self.query_scores = Weights(geometry, rank, hidden, lr_mul)
        self.key_scores = Weights(geometry, rank, hidden, lr_mul)
        self.query_weights = Weights(geometry, rank, hidden, lr_mul)
        self.key_weights = Weights(geometry, rank, hidden, lr_mul)
        self.base_scores = Param((heads, heads), init=zeros, role="gate", lr_mul=lr_mul, wd_mul=0.0)
        self.base_weights = Param(
            (heads, heads), init=zeros, role="gate", lr_mul=lr_mul, wd_mul=0.0
        )

    def flops(self, keys: float) -> float:
        """Count a token's FLOPs, forward and backward: the two products, and two compositions of H scores."""
        return 12 * (self.count + self.heads * (self.heads + 4 * self.rank)) * keys

    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
        x: Any,
        mask: Any,
        scale: float,
        key_scores: Any,
        key_weights: Any,
    ) -> tuple[Any, Any, Any]:
        """Attend: q (B, T, H, D), k, v (B, S, K, D), x (B, T, C) -> y (B, T, H, D), two cached functions of x."""
        ops: Any = self.ops
        (B, T, H, D), (S, K) = q.shape, k.shape[1:3]
        of_scores, of_weights = self.key_scores(x), self.key_weights(x)  # (B, T, 2 R + 1, H)
        all_scores, all_weights = of_scores, of_weights  # (B, S, 2 R + 1, H)
        if key_scores is not None:
            all_scores = ops.concat([key_scores, of_scores], 1)
            all_weights = ops.concat([key_weights, of_weights], 1)
        grouped = ops.reshape(ops.permute_dims(q * scale, (0, 2, 1, 3)), (B, K, H // K * T, D))
        a = ops.reshape(grouped @ ops.permute_dims(k, (0, 2, 3, 1)), (B, H, T, S))
        a = self.compose(
            ops.astype(a, "float32"), self.base_scores, self.query_scores(x), all_scores
        )
        a = ops.where(mask, a, HIDDEN)
        a = ops.exp(a - ops.stop_gradient(ops.max(a, -1, keepdims=True)))
        a = a / ops.sum(a, -1, keepdims=True)
        a = self.compose(a, self.base_weights, self.query_weights(x), all_weights)
        a = ops.astype_like(ops.reshape(a, (B, K, H // K * T, S)), v)
        y = ops.reshape(a @ ops.permute_dims(v, (0, 2, 1, 3)), (B, H, T, D))
        return ops.permute_dims(y, (0, 2, 1, 3)), of_scores, of_weights

    def compose(self, a: Any, base: Any, of_query: Any, of_key: Any) -> Any:
        """a float32 (B, H, T, S), base (H, H), of_query (B, T, 2 R + 1, H), of_key (B, S, 2 R + 1, H) -> a."""
        ops: Any = self.ops
        flat = ops.reshape(a, (*a.shape[:2], -1))  # (B, H, T S)
        fixed = ops.matrix_transpose(ops.astype(base, "float32")) @ flat
        found = a + ops.reshape(fixed, a.shape)
        for of, axis in ((of_query, 4), (of_key, 3)):
            # (2 R + 1, B, H, T, 1), or (2 R + 1, B, H, 1, S)
            of = ops.expand_dims(ops.permute_dims(ops.astype(of, "float32"), (2, 0, 3, 1)), axis)
            for r in range(self.rank):  # sums and products by element, which a compiler fuses
                found = found + of[self.rank + r] * ops.sum(of[r] * a, 1, keepdims=True)
            found = found + of[2 * self.rank] * a
        return found


class Weights(Module):
    """x (B, T, C) -> w1, w2 and tanh(d) of each token, (B, T, 2 R + 1, H)."""

    def __init__(self, geometry: Any, rank: int, hidden: int, lr_mul: float) -> None:
        super().__init__()
        self.rank, self.heads, self.eps = rank, geometry.heads, geometry.norm_eps
        dim, heads = geometry.dim, geometry.heads
        self.up = Linear(dim, hidden, role="gate", lr_mul=lr_mul)
        self.first = Linear(hidden, rank * heads, role="gate", lr_mul=lr_mul)
        self.second = Linear(hidden, rank * heads, role="gate", init=zeros, lr_mul=lr_mul)
        self.gate = Linear(dim, heads, role="gate", init=zeros, lr_mul=lr_mul)

    def forward(self, x: Any) -> Any:
        """x (B, T, C) -> (B, T, 2 R + 1, H)."""
        ops: Any = self.ops
        hidden, shape = gelu(ops, self.up(x)), (*x.shape[:2], self.rank, self.heads)
        first = ops.rms_norm(ops.reshape(self.first(hidden), shape), None, self.eps)
        second = ops.reshape(self.second(hidden), shape)
        return ops.concat([first, second, ops.expand_dims(ops.tanh(self.gate(x)), 2)], 2)
