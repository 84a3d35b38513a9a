"""A contrastive term that pushes the hidden states of a row's tokens apart (SimCTG, arXiv:2202.06417).

    loss = CE(labels) + weight mean over i != j of max(0, margin - 1 + cos(h_i, h_j))

h are the states after the last norm. Language models place all tokens in a narrow cone, with cosines
near 1, so that contrastive decoding cannot distinguish them. Here a token's cosine with itself, 1, has to
exceed that with every other token of its row by ``margin``. The mean is over supervised positions i, and
for each over the others, j, of its row. Rows are compared with no other row, so that neither the batch
size nor the number of processes changes the term.

Cost: T^2 cosines for each row, in float32.
"""

from __future__ import annotations

from typing import Any

from minillm_core import EVERYTHING, Module, Plugin, option

__all__ = ["Contrast", "SimCTG"]


class SimCTG(Plugin, api=1):
    """Hidden states of different tokens of a row are pushed apart: a contrastive term of the loss."""

    margin: float = option(
        0.5, gt=0, le=2, search=(0.2, 0.8), help="minimum of 1 - cos of two tokens' states"
    )
    weight: float = option(1.0, gt=0, help="weight of the term; the labels' loss has weight 1")

    def compute_loss(self, loss):
        loss.term("contrast", Contrast, weight=self.weight, margin=self.margin)


class Contrast(Module):
    """x (B, T, C), labels (B, T) -> the mean hinge of cosines between different tokens."""

    lookback = EVERYTHING

    def __init__(self, margin: float) -> None:
        super().__init__()
        self.margin = margin

    def forward(self, x: Any, head: Any, form: Any, labels: Any) -> Any:
        """Compute the mean over supervised positions; 0 if there are none."""
        ops: Any = self.ops
        x = ops.astype(x, "float32")
        squares = ops.sum(x * x, -1, keepdims=True)
        h = x / ops.sqrt(squares + ops.like(1e-12, squares))  # (B, T, C), of length 1
        cosine = h @ ops.permute_dims(h, (0, 2, 1))  # (B, T, T)
        there = ops.astype(labels >= 0, "float32")  # (B, T)
        place = ops.arange(labels.shape[1])
        apart = ops.astype(ops.expand_dims(place, 1) != ops.expand_dims(place, 0), "float32")
        others = ops.expand_dims(there, 1) * apart  # (B, T, T): j of each i
        hinge = ops.maximum(cosine - (1.0 - self.margin), ops.like(0.0, cosine))
        one = ops.like(1.0, there)
        near = ops.sum(hinge * others, -1) / ops.maximum(ops.sum(others, -1), one)  # (B, T)
        return ops.sum(near * there) / ops.maximum(ops.sum(there), one)
