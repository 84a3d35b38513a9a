"""Hashed bigrams: an embedding of each token with the one before it (modded-nanogpt).

    h_t = (36313 id_t xor 27191 id_(t-1)) mod (rows - 1)
    x   = x + lambda_i table[h_t]                          at the entry of every layer i

What follows a pair of tokens need not be computed by attention: it is looked up. The table is
5 vocabularies long, so that frequent pairs seldom meet another; it starts at 0, which leaves the
model as it was, and the lambdas at 0.05. Ids are hashed in the loader's thread. The first column of
a row has no token before it and reads the table's last row. (Hashed n-grams: arXiv:1607.01759.)
nanochat found that it no longer pays in larger models.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from pydantic import Field

from minillm_core import Geometry, Layers, Learned, Module, Param, Plugin, option, zeros

__all__ = ["BigramHash", "Table", "hashed", "rows_of"]

ROLE = "embedding.bigram"
HERE, BEFORE = 36313, 27191
"""Odd, and without a common factor: the records'."""

Beta = Annotated[float, Field(ge=0, lt=1)]


class BigramHash(Plugin, api=1, identity_at_init=True):
    """An embedding of each pair of neighbouring tokens, hashed, at the entry of the layers."""

    size: float = option(5.0, gt=0, le=1000, help="rows of the table, in vocabularies")
    layers: Layers = option("all", help='layers at whose entry it is added: "all", [0, -1]')
    start: float = option(0.05, help="of the learned coefficient at each of those layers")
    lr_mul: float = option(75.0, ge=0, help="factor on the table's learning rate")
    wd_mul: float = option(0.0, ge=0, help="factor on its weight decay")
    betas: tuple[Beta, Beta] | None = option(
        (0.75, 0.95), help="AdamW's, for the table; none: train.betas"
    )
    coefficient_lr_mul: float = option(
        1.0, ge=0, help="factor on the learning rate of the coefficients"
    )

    def build_data(self, data):
        data.field("bigram", "int32")

    def on_batch(self, batch, phase, vocab):
        return {**batch, "bigram": hashed(batch["ids"], rows_of(vocab, self.size))}

    def build_model(self, model):
        model.stream(
            "bigram_embedding", Table, size=self.size, lr_mul=self.lr_mul, wd_mul=self.wd_mul
        )
        for layer in self.layers.resolve(model.layers):
            coefficient = Learned(self.start, lr_mul=self.coefficient_lr_mul)
            model.residual(f"layers.{layer}.in", "bigram_embedding", coefficient)

    def optimizer_factory(self, optimizer):
        if self.betas is not None:
            optimizer.set(lambda _, p: p.role == ROLE, betas=self.betas)


def rows_of(vocab: int, size: float) -> int:
    """Rows of the table: two at least, the last being that of a row's first column."""
    return max(2, round(vocab * size))


def hashed(ids: np.ndarray, rows: int) -> np.ndarray:
    """ids int32 (B, T) -> int32 (B, T), below ``rows``."""
    wide = ids.astype(np.int64)
    pairs = (HERE * wide[:, 1:]) ^ (BEFORE * wide[:, :-1])
    first = np.full((len(ids), 1), rows - 1)
    return np.concatenate([first, pairs % (rows - 1)], 1).astype(np.int32)


class Table(Module):
    """bigram int32 (B, T) -> (B, T, C)."""

    def __init__(self, geometry: Geometry, size: float, lr_mul: float, wd_mul: float) -> None:
        super().__init__()
        self.weight = Param(
            (rows_of(geometry.vocab, size), geometry.dim),
            axes=("bigrams", "dim"),
            init=zeros,
            role=ROLE,
            lr_mul=lr_mul,
            wd_mul=wd_mul,
        )

    def forward(self, bigram: Any) -> Any:
        """bigram int32 (B, T) -> (B, T, C)."""
        return self.ops.embedding(bigram, self.weight)
