"""The plain model in PyTorch, written by hand: one nn.Linear per matrix, without minillm.

It has the same operations as minillm's plain model, so that their traced graphs can be
compared; parameters have the same names, so that weights of one load into the other.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.handwritten.shape import GPT2_124M, Shape

__all__ = ["GPT"]


class RMSNorm(nn.Module):
    """x (..., C) -> (..., C), float32 inside."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.dim))
        self.epsilon = shape.epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.epsilon)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (B, T, H, D) by cos, sin float32 (T, 1, D/2), in float32, and return x's dtype."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """x (B, T, C) -> (B, T, C), causal."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        kv = shape.kv_heads * shape.head_dim
        self.q = nn.Linear(shape.dim, shape.dim, bias=False)
        self.k = nn.Linear(shape.dim, kv, bias=False)
        self.v = nn.Linear(shape.dim, kv, bias=False)
        self.o = nn.Linear(shape.dim, shape.dim, bias=False)
        self.head_dim = shape.head_dim
        self.grouped = shape.kv_heads != shape.heads

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (leaf(x).reshape(B, T, -1, self.head_dim) for leaf in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.grouped,
        )
        return self.o(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """SwiGLU: x (B, T, C) -> (B, T, C)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """x (B, T, C) -> (B, T, C)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(shape), Attention(shape)
        self.mlp_norm, self.mlp = RMSNorm(shape), MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """ids, labels int (B, T) -> mean cross-entropy, 0-d float32."""

    cos: Tensor  # float32 (P, D/2)
    sin: Tensor

    def __init__(self, shape: Shape = GPT2_124M) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.dim)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape)
        half = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
        positions = torch.arange(shape.positions, dtype=torch.float64)
        angles = torch.outer(positions, shape.rope_base**-half)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                added = name.endswith(("attention.o.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=shape.output_std if added else 0.02)

    def hidden(self, ids: Tensor) -> Tensor:
        """Return the input of the head, after the last norm: ids (B, T) -> (B, T, C)."""
        x = self.embedding(ids)
        T = ids.shape[1]
        cos, sin = (table.narrow(0, 0, T).unsqueeze(-2) for table in (self.cos, self.sin))
        for block in self.layers:
            x = block(x, cos, sin)
        return self.norm(x)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss over all positions; labels < 0 contribute 0."""
        logits = F.linear(self.hidden(ids), self.embedding.weight).float()  # (B, T, V), tied
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten().long(), ignore_index=-1)
