"""Interleaved head attention: heads are mixed into P pseudo-heads each, which attend to one another.

    q_(h,p) = sum_m A_p[m, h] q_m,   k and v likewise        p = 0 .. P - 1, each over heads m
    one sequence of P T positions: (t, p) is at P t + p, and is rotated there
    y_h     = sum_p c[h, p] y_(h,p)                          back to H heads

With P pseudo-heads a head has P^2 attention patterns, which also use other heads' queries and keys:
multi-step reasoning needs combined patterns (arXiv:2602.21371; slowrun, 2026). At the start
each head is its own pseudo-head 0, the others are 0, and c = 1 / P, as in slowrun; A is stored as the
difference from that. Weight decay is off, since a mixture should not shrink to 0.

Full causal attention costs P^2 times as much, and the KV cache is P times as large; a window counts
pseudo-heads, so that one of W tokens is P W (slowrun keeps the cost with 1 / P of the window). q, k and v
no longer correspond to y head by head, so that plugins which correct y by them are refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minillm_core import Buffer, Constant, Geometry, Layers, Layout, Param, Plugin, option, zeros

__all__ = ["IHA", "Pseudo"]


class IHA(Plugin, api=1):
    """Heads are mixed into pseudo-heads, which share one sequence and are summed up again."""

    pseudo: int = option(2, ge=2, le=8, help="pseudo-heads per head, P")
    values: bool = option(
        True, help="mix values as well; false: all pseudo-heads of a head share its own values"
    )
    lr_mul: float = option(1.0, gt=0, help="factor on the learning rate of the mixing weights")
    layers: Layers = option("all", help='layers with pseudo-heads: "all", [0, -1], "every:2"')

    def build_attention(self, attn):
        if attn.layer not in self.layers.resolve(attn.layers):
            return
        attn.layout(Pseudo, pseudo=self.pseudo, values=self.values, lr_mul=self.lr_mul)
        why = "mixed q, k and v no longer line up with y head by head"
        attn.out.correct.close(why)
        attn.out.project_out.close(why)


class Pseudo(Layout):
    """A layout (B, T, H, D) -> (B, P T, H, D) and back.

    Args:
        geometry: heads and key-value heads.
        pseudo: P.
        values: whether v is mixed.
        lr_mul: factor on the learning rate.
    """

    rope = "after"
    stretch = 2  # at least: by the class, the core refuses what reads a value per token

    def __init__(self, geometry: Geometry, pseudo: int, values: bool, lr_mul: float) -> None:
        super().__init__()
        self.stretch = self.pseudo = pseudo
        heads, kv_heads = geometry.heads, geometry.kv_heads
        self.q = mixture(heads, pseudo, lr_mul)
        self.k = mixture(kv_heads, pseudo, lr_mul)
        self.v = mixture(kv_heads, pseudo, lr_mul) if values else None
        self.own = Buffer((pseudo * heads, heads), lambda: first(heads, pseudo))
        self.own_kv = Buffer((pseudo * kv_heads, kv_heads), lambda: first(kv_heads, pseudo))
        self.collapse = Param(
            (pseudo, heads), init=Constant(1.0 / pseudo), role="scalar", lr_mul=lr_mul, wd_mul=0.0
        )

    def enter(self, call: Any) -> Any:
        """Mix heads, and interleave the pseudo-heads of a token."""
        v: Any = self.v
        return call._replace(
            q=self.mixed(call.q, self.q, self.own),
            k=self.mixed(call.k, self.k, self.own_kv),
            v=self.repeated(call.v) if v is None else self.mixed(call.v, v, self.own_kv),
            positions=None if call.positions is None else self.beside(call.positions),
            documents=None if call.documents is None else self.each(call.documents),
        )

    def leave(self, y: Any) -> Any:
        """Combine y (B, P T, H, D) -> (B, T, H, D)."""
        ops: Any = self.ops
        B, length, H, D = y.shape
        y = ops.reshape(y, (B, length // self.pseudo, self.pseudo, H, D))
        return ops.sum(y * ops.astype_like(self.collapse, y)[:, :, None], 2)

    def mixed(self, x: Any, weight: Any, own: Any) -> Any:
        """Mix x (B, T, M, D) by weight and own (P M, M) -> (B, P T, M, D)."""
        ops: Any = self.ops
        B, T, M, D = x.shape
        mixture = ops.astype_like(weight, x) + ops.astype_like(own, x)
        return ops.reshape(mixture @ x, (B, T * self.pseudo, M, D))

    def repeated(self, x: Any) -> Any:
        """Repeat x (B, T, M, D) -> (B, P T, M, D)."""
        B, T, M, D = x.shape
        wide = self.ops.broadcast_to(x[:, :, None], (B, T, self.pseudo, M, D))
        return self.ops.reshape(wide, (B, T * self.pseudo, M, D))

    def beside(self, positions: Any) -> Any:
        """Map positions (..., T) to P t, P t + 1, ... (..., P T)."""
        ops: Any = self.ops
        each = ops.stack([positions * self.pseudo + p for p in range(self.pseudo)], -1)
        return ops.reshape(each, (*positions.shape[:-1], -1))

    def each(self, documents: Any) -> Any:
        """Repeat documents (B, T) -> (B, P T)."""
        each = self.ops.stack([documents] * self.pseudo, -1)
        return self.ops.reshape(each, (documents.shape[0], -1))


def mixture(heads: int, pseudo: int, lr_mul: float) -> Param:
    """Declare (P M, M): a pseudo-head's coefficients of each head, relative to the initial ones."""
    shape = (pseudo * heads, heads)
    axes = ("pseudo", "heads")
    return Param(shape, axes=axes, init=zeros, role="scalar", lr_mul=lr_mul, wd_mul=0.0)


def first(heads: int, pseudo: int) -> np.ndarray:
    """Return the initial coefficients float32 (P M, M): each head is its own pseudo-head 0, the others are 0."""
    return np.eye(pseudo * heads, heads, dtype=np.float32)
