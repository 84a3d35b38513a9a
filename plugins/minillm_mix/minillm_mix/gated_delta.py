"""Gated DeltaNet: a fixed-size recurrent memory with a forget gate and the delta rule (arXiv:2412.06464).

    S_t = a_t S_(t-1) (I - b_t k_t k_t^T) + b_t v_t k_t^T          a head's memory, (D, D)
    y_t = S_t q_t                                                  q and k have norm one
    a_t = exp(-exp(A) softplus(w_a x_t + c)), b_t = sigmoid(w_b x_t)

q, k and v first pass a causal convolution over four tokens and silu; y is normalised per head and gated by
silu(Wg x), as published. Cost and memory grow linearly with the text: training computes it in
chunks of C tokens (the paper's WY form). With u_t = b_t (v_t - a_t S_(t-1) k_t) and g_t the product of a
up to t within a chunk that starts with the memory S,

    (I + L) U = b (V - g K S^T),   L_ti = b_t (g_t / g_i) (k_t k_i)  for i < t
    Y = g Q S^T + M U,             M_ti = (g_t / g_i) (q_t k_i)      for i <= t
    S' = g_C S + U^T R,            R_i = (g_C / g_i) k_i

where L is nilpotent, so that (I + L)^-1 = (I - L)(I + L^2)(I + L^4) ... exactly. With W = (I + L)^-1 b V and
Z = (I + L)^-1 b g K the memory is S' = g_C S + W^T R - S Z^T R: all but this one product of D x D matrices is
computed for all chunks at once. Decoding stores S and the
last three columns of the convolution: D^2 + 9 D numbers per head and layer, independent of the text's length.

It replaces the whole attention of its layers, and all heads have keys of their own; it has no positions and no
windows. Where attention is restricted to a token's document (windows.documents), memory and
convolution are empty at a document's start: g_t and g_t / g_i are 0 across a start.

A head's y is a difference of products and may be close to 0, so that its norm magnifies rounding: in
float32 gradients differ by 1.5e-6 of their norm from float64's, equally on torch and on MLX, in chunks and
token by token; with eps = 0.1 the difference is that of softmax attention, 6e-7.
"""

from __future__ import annotations

from typing import Any

from minillm_core import (
    Constant,
    Layers,
    Linear,
    Module,
    Normal,
    Param,
    Plugin,
    ones,
    option,
    zeros,
)

__all__ = ["GatedDelta", "Memory"]

TAPS = 4
"""Number of tokens in the convolution."""


class GatedDelta(Plugin, api=1):
    """Memory of fixed size in place of attention, with gated forgetting and delta-rule corrections."""

    chunk: int = option(64, ge=1, le=256, help="tokens per chunk in training")
    eps: float | None = option(
        None, gt=0, help="epsilon of y's RMS norm per head; none: model.norm_eps"
    )
    layers: Layers = option(
        "all", help='layers with Gated DeltaNet as attention: "all", [0, -1], "every:2"'
    )

    def build_model(self, model):
        for layer in self.layers.resolve(model.layers):
            model.attention(layer, Memory, chunk=self.chunk, eps=self.eps)


class Memory(Module):
    """The gated delta rule: x (B, T, C) -> (B, T, C)."""

    keeps = ("memory", "tail")
    recurrent = ("memory", "tail")

    def __init__(self, geometry: Any, chunk: int, eps: float | None = None) -> None:
        super().__init__()
        g, width = geometry, geometry.heads * geometry.head_dim
        self.heads, self.size, self.chunk = g.heads, g.head_dim, chunk
        self.eps = g.norm_eps if eps is None else eps
        for name in ("q", "k", "v"):
            leaf = Linear(g.dim, width, role=f"attention.{name}", axes=("heads", "dim"))
            setattr(self, name, leaf)
        self.gate = Linear(g.dim, width, role="attention.gate", axes=("heads", "dim"))
        self.decay = Linear(g.dim, g.heads, role="gate", axes=("heads", "dim"))
        self.write = Linear(g.dim, g.heads, role="gate", axes=("heads", "dim"))
        self.rate = Param((g.heads,), init=zeros, role="scalar", wd_mul=0.0)  # A
        # softplus(-4.6) = 0.01: an initial memory of a hundred tokens
        self.bias = Param((g.heads,), init=Constant(-4.6), role="scalar", wd_mul=0.0)
        self.taps = Param((TAPS, 3 * width), init=Normal(0.5), role="scalar", wd_mul=0.0)
        self.norm = Param((g.head_dim,), init=ones, role="norm", wd_mul=0.0)
        self.o = Linear(
            width,
            g.dim,
            role="attention.o",
            axes=("dim", "heads"),
            init=Normal((2 * g.layers * width) ** -0.5),
        )

    def flops(self, keys: float) -> float:
        """Count a token's FLOPs, forward and backward: products in a chunk, with the memory, and of memories."""
        C, D = self.chunk, self.size
        return 6 * self.heads * D * (5 * C + 4 * D + D * D / C)

    def forward(self, x: Any, documents: Any, memory: Any, tail: Any) -> tuple[Any, Any, Any]:
        """x (B, T, C), documents (B, S), memory (B, H, D, D), tail (B, 3, 3 H D) -> y, new memory and tail."""
        ops: Any = self.ops
        (B, T, _), H, D = x.shape, self.heads, self.size
        flat = ops.concat([self.q(x), self.k(x), self.v(x)], -1)  # (B, T, 3 H D)
        if tail is None:
            tail = ops.zeros_like(flat[:, :1]) + ops.zeros((1, TAPS - 1, 1), "float32")
            tail = ops.astype_like(tail, flat)
        whole = ops.concat([tail, flat], 1)
        of = None if documents is None else numbered(ops, documents, T)  # (B, 3 + T)
        taps: Any = self.taps
        mixed = whole[:, TAPS - 1 :] * taps[TAPS - 1]
        for tap in range(TAPS - 1):
            seen = whole[:, tap : tap + T]
            if of is not None:
                own = ops.expand_dims(of[:, tap : tap + T] == of[:, TAPS - 1 :], -1)
                seen = seen * ops.astype_like(own, seen)
            mixed = mixed + seen * taps[tap]
        mixed = ops.astype(ops.silu(mixed), "float32")
        q, k, v = (
            ops.permute_dims(ops.reshape(one, (B, T, H, D)), (0, 2, 1, 3))  # (B, H, T, D)
            for one in ops.split(mixed, 3, -1)
        )
        q, k = (one / ops.sqrt(ops.sum(one * one, -1, keepdims=True) + 1e-6) for one in (q, k))
        y, memory = self.chunks(q, k, v, *self.gates(x), memory, of)
        y = ops.permute_dims(y, (0, 2, 1, 3))  # (B, T, H, D)
        y = ops.rms_norm(ops.astype_like(y, x), self.norm, self.eps)
        gate = ops.silu(ops.reshape(self.gate(x), (B, T, H, D)))
        return self.o(ops.reshape(y * gate, (B, T, H * D))), memory, whole[:, T:]

    def gates(self, x: Any) -> tuple[Any, Any]:
        """Return log a and b, float32 (B, H, T, 1)."""
        ops: Any = self.ops
        open_, write = (ops.astype(leaf(x), "float32") for leaf in (self.decay, self.write))
        open_ = open_ + ops.astype(self.bias, "float32")
        softplus = ops.maximum(open_, 0.0) + ops.log(1.0 + ops.exp(-ops.abs(open_)))
        log_a = softplus * (-ops.exp(ops.astype(self.rate, "float32")))
        shaped = (ops.permute_dims(one, (0, 2, 1)) for one in (log_a, ops.sigmoid(write)))
        log_a, b = (ops.expand_dims(one, -1) for one in shaped)
        return log_a, b

    def chunks(
        self, q: Any, k: Any, v: Any, log_a: Any, b: Any, memory: Any, of: Any
    ) -> tuple[Any, Any]:
        """Compute y from all chunks side by side; only the memory goes from one to the next.

        Args:
            q, k, v: float32 (B, H, T, D).
            log_a, b: float32 (B, H, T, 1).
            memory: before the first token, float32 (B, H, D, D); None: empty.
            of: documents, int32 (B, 3 + T); None: all tokens are of one.

        Returns:
            y (B, H, T, D), and the memory after the last token.
        """
        ops: Any = self.ops
        turned, (B, H, T, D) = ops.matrix_transpose, q.shape
        C = min(self.chunk, T)
        N = -(-T // C)
        missing = N * C - T  # tokens that fill the last chunk write nothing and forget nothing

        def cut(one: Any) -> Any:  # (B, H, T, d) -> (B, N, H, C, d)
            if missing:
                one = ops.concat([one, ops.zeros_like(one[:, :, :missing])], 2)
            return ops.permute_dims(ops.reshape(one, (B, H, N, C, one.shape[-1])), (0, 2, 1, 3, 4))

        q, k, v, log_a, b = (cut(one) for one in (q, k, v, log_a, b))
        log_g = ops.cumsum(log_a, 3)  # (B, N, H, C, 1)
        # at most 0 where i <= t; values above the diagonal are clipped
        ratio = ops.exp(ops.minimum(log_g - turned(log_g), 0.0))  # (B, N, H, C, C): g_t / g_i
        g = ops.exp(log_g)
        if of is not None:
            if missing:
                of = ops.concat([of, of[:, -1:] + ops.zeros_like(of[:, :missing])], 1)
            its, before = (
                ops.reshape(of[:, at : at + N * C], (B, N, C)) for at in (TAPS - 1, TAPS - 2)
            )
            ratio = ratio * alike(ops, its, its)
            g = g * alike(ops, its, before[:, :, :1])
        lower = ops.tril(ratio * (k @ turned(k)), -1) * b
        both = ops.concat([b * v, (b * g) * k], -1)  # (B, N, H, C, 2 D)
        both = both - lower @ both
        power, span = lower @ lower, 2
        while span < C:  # (I + L)^-1 = (I - L) (I + L^2) (I + L^4) ...: L^C is 0
            both = both + power @ both
            power, span = power @ power, 2 * span
        written, read = ops.split(both, 2, -1)  # U = written - read S^T
        kept = k * turned(
            ratio[:, :, :, C - 1 :]
        )  # (B, N, H, C, D): keys, as their chunk's end sees them
        if memory is None:
            memory = ops.zeros_like(turned(v[:, 0, :, :1]) @ k[:, 0, :, :1])  # (B, H, D, D)

        def step(memory: Any, chunk: Any) -> tuple[Any, Any]:
            added, replaced, open_ = chunk  # (B, H, D, D) twice, (B, H, 1, 1)
            return memory * open_ + added - memory @ replaced, memory

        memory, found = ops.scan(
            step, memory, (turned(written) @ kept, turned(read) @ kept, g[:, :, :, C - 1 :])
        )
        past = turned(found)  # (B, N, H, D, D): each chunk's S^T
        u = written - read @ past
        y = g * (q @ past) + ops.tril(ratio * (q @ turned(k))) @ u
        y = ops.reshape(ops.permute_dims(y, (0, 2, 1, 3, 4)), (B, H, N * C, D))
        return y[:, :, :T], memory


def numbered(ops: Any, documents: Any, count: int) -> Any:
    """Number the documents of the last columns, and of the three before them: (B, S) -> int32 (B, 3 + count).

    Columns before the first count as its document: they are empty.
    """
    first = ops.zeros_like(documents[:, :1])
    begins = ops.astype_like(documents[:, 1:] != documents[:, :-1], documents)
    before = [first] * TAPS  # for three columns, and the first itself
    return ops.cumsum(ops.concat([*before, begins], 1), 1)[:, documents.shape[1] - count :]


def alike(ops: Any, ones: Any, others: Any) -> Any:
    """Return 1 where two columns are of one document, else 0: (B, N, C), (B, N, D) -> float32 (B, N, 1, C, D)."""
    equal = ops.expand_dims(ones, 3) == ops.expand_dims(others, 2)
    return ops.expand_dims(ops.astype(equal, "float32"), 2)
