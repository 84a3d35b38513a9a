"""Multi-head latent attention: keys and values computed from one small latent (DeepSeek-V2, arXiv:2405.04434).

    c_t   = RMSNorm(Wkv x_t)                                kv_rank numbers per token
    k_t,h = [Wk,h c_t, RoPE(Wr x_t)]    v_t,h = Wv,h c_t    the rotated part is shared by all heads
    q_t,h = [Wq,h x_t, RoPE(Wqr,h x_t)]                     or of RMSNorm(Wdq x_t), with q_rank
    y     = softmax(q k^T / sqrt(head_dim + rope_dim)) v Wo

The KV cache holds c and the rotated part, ``kv_rank + rope_dim`` numbers per token and layer, instead of
2 H D: keys and values are recomputed from them. (The paper also
absorbs Wk and Wv into other products in decoding; here they are kept, so that plugins which replace a
product, such as adapters, are the same in training and decoding.) The paper's sizes are
kv_rank = 4 head_dim and rope_dim = head_dim / 2. It replaces the whole attention of a layer, with the same
window and documents: other attention slots apply only to the other layers.
"""

from __future__ import annotations

from typing import Any

from minillm_core import (
    Layers,
    Linear,
    Module,
    Normal,
    Param,
    PlanError,
    Plugin,
    Rope,
    llama_frequencies,
    ones,
    option,
)

__all__ = ["MLA", "Latent"]


class MLA(Plugin, api=1):
    """Keys and values are computed from one small latent per token, which is all that is cached."""

    kv_rank: int | None = option(
        None, ge=1, help="width of the latent of keys and values; none: 4 head_dim"
    )
    rope_dim: int | None = option(
        None,
        ge=2,
        help="rotated features per head, in addition to head_dim; none: half of head_dim",
    )
    q_rank: int | None = option(None, ge=1, help="width of the latent of queries; none: no latent")
    rope_base: float | None = option(
        None, gt=1, help="base of the rotary frequencies; none: model.rope_base"
    )
    layers: Layers = option("all", help='layers with latent attention: "all", [0, -1], "every:2"')

    def build_model(self, model):
        rope_dim = model.head_dim // 2 // 2 * 2 if self.rope_dim is None else self.rope_dim
        if rope_dim % 2 or not rope_dim:
            raise PlanError(
                f"mla cannot rotate {rope_dim} features of a head: they are rotated in pairs",
                where=f"mla.rope_dim={self.rope_dim} model.head_dim={model.head_dim}",
                fix="mla.rope_dim=8, or another even number",
            )
        for layer in self.layers.resolve(model.layers):
            model.attention(
                layer,
                Latent,
                kv_rank=self.kv_rank or 4 * model.head_dim,
                rope_dim=rope_dim,
                q_rank=self.q_rank,
                base=self.rope_base or model.rope_base,
            )


class Latent(Module):
    """Causal self-attention whose keys and values are linear functions of a latent."""

    keeps = ("latent",)

    def __init__(
        self, geometry: Any, kv_rank: int, rope_dim: int, q_rank: int | None, base: float
    ) -> None:
        super().__init__()
        g, heads, plain = geometry, geometry.heads, geometry.head_dim
        self.sizes = heads, plain, rope_dim
        self.kv_rank, self.eps = kv_rank, g.norm_eps
        self.kv_norm = Param((kv_rank,), init=ones, role="norm", wd_mul=0.0)
        self.q_norm = self.q_down = None
        if q_rank is not None:
            self.q_down = Linear(g.dim, q_rank, role="attention.q", axes=("latent", "dim"))
            self.q_norm = Param((q_rank,), init=ones, role="norm", wd_mul=0.0)
        width = heads * (plain + rope_dim)
        self.q = Linear(q_rank or g.dim, width, role="attention.q", axes=("heads", "dim"))
        self.kv_down = Linear(g.dim, kv_rank + rope_dim, role="attention.k", axes=("latent", "dim"))
        self.k = Linear(kv_rank, heads * plain, role="attention.k", axes=("heads", "latent"))
        self.v = Linear(kv_rank, heads * plain, role="attention.v", axes=("heads", "latent"))
        self.o = Linear(
            heads * plain,
            g.dim,
            role="attention.o",
            axes=("dim", "heads"),
            init=Normal((2 * g.layers * heads * plain) ** -0.5),
        )
        self.rope = Rope(llama_frequencies(rope_dim, base), g.positions)

    def flops(self, keys: float) -> float:
        """Count a token's FLOPs, forward and backward, of q k^T and its product with v."""
        heads, plain, rope_dim = self.sizes
        return 6 * heads * (2 * plain + rope_dim) * keys

    def forward(self, x: Any, window: int | None, documents: Any, latent: Any) -> tuple[Any, Any]:
        """x (B, T, C), documents (B, S), latent (B, S - T, kv_rank + rope_dim) or None -> (B, T, C), x's latent."""
        ops, (B, T, _), (H, D, R) = self.ops, x.shape, self.sizes
        earlier = 0 if latent is None else latent.shape[1]
        positions = ops.arange(earlier + T)[earlier:] if earlier else None
        q = x if self.q_down is None else ops.rms_norm(self.q_down(x), self.q_norm, self.eps)
        q_plain, q_turned = ops.split(ops.reshape(self.q(q), (B, T, H, D + R)), [D, R], -1)
        c, k_turned = ops.split(self.kv_down(x), [self.kv_rank, R], -1)
        k_turned = ops.expand_dims(k_turned, 2)  # (B, T, 1, R): shared by all heads
        q_turned, k_turned = ops.rotate(q_turned, k_turned, self.rope(positions))
        new = ops.concat([ops.rms_norm(c, self.kv_norm, self.eps), k_turned[:, :, 0]], -1)
        whole = new if latent is None else ops.concat([latent, new], 1)  # (B, S, kv_rank + R)

        c, k_turned = ops.split(whole, [self.kv_rank, R], -1)
        S = whole.shape[1]
        k, v = (ops.reshape(leaf(c), (B, S, H, D)) for leaf in (self.k, self.v))
        k_turned = ops.broadcast_to(ops.expand_dims(k_turned, 2), (B, S, H, R))
        k = ops.concat([k, k_turned], -1)
        v = ops.concat([v, ops.zeros_like(k_turned)], -1)  # kernels support only one head size
        q = ops.concat([q_plain, q_turned], -1)
        y = ops.attention(q, k, v, window=window, documents=documents)
        return self.o(ops.reshape(y[..., :D], (B, T, H * D))), new
