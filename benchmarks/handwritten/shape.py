"""The shape of both hand-written models: that of the preset gpt2-124m."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GPT2_124M", "TINY", "Shape"]


@dataclass(frozen=True)
class Shape:
    """A Llama-shaped decoder with a tied head."""

    layers: int = 12
    dim: int = 768
    heads: int = 12
    kv_heads: int = 12
    hidden: int = 2048
    vocab: int = 50304
    positions: int = 1024
    rope_base: float = 10_000.0
    epsilon: float = 1e-5

    @property
    def head_dim(self) -> int:
        """The width of one head."""
        return self.dim // self.heads

    @property
    def output_std(self) -> float:
        """Standard deviation of products added to the stream: GPT-2's rule."""
        return 0.02 / (2 * self.layers) ** 0.5


GPT2_124M = Shape()
TINY = Shape(layers=2, dim=64, heads=2, kv_heads=2, hidden=128, vocab=512, positions=64)
