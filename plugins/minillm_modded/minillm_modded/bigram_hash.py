"""Hashed bigram embedding: an embedding of each token together with the previous one (modded-nanogpt).

    h_t = (36313 id_t xor 27191 id_(t-1)) mod (rows - 1)
    x   = x + lambda_i table[h_t]                          at the entry of every layer i

Statistics of token pairs are looked up instead of computed by attention. The table has 5 times as many
rows as the vocabulary, so that frequent pairs rarely collide; it starts at 0, which leaves the model
unchanged, and the lambdas at 0.05. Ids are hashed in the dataloader's thread. The first column of a row
has no previous token and reads the table's last row; a document's first token in the middle of a row is
paired with the last one of the document before, as in the record. (Hashed n-grams: arXiv:1607.01759.)
nanochat found no benefit in larger models; within preset speedrun it helps as much at 1 G parameters as at
51 M, after 2 M tokens (docs/experiments.md). With ``sparse_rows``, only the rows that a step
looks up are read and updated.

With ``signs`` = S, a pair's row is multiplied by fixed random signs, chosen by the pair:

    x   = x + lambda_i (signs[s_t] * table[h_t]),    s_t = (id_t xor id_(t-1)) mod S

Two pairs in one row of the table then mostly differ in about half of their signs, so that one pair's
updates act on the other as zero-mean noise instead of a bias (feature hashing with signs:
arXiv:0902.2206; the record's by trianxy, 2026-06). The first column reads the first row of signs.

The records' values: 2026-01 starts with lambda 0.1 and has 5 times the decay (``start=0.1``,
``wd_mul=5``). From 2026-02 on, all layers but the first add it to the output of attention
(``behind_attention``). The version of 2026-08 has ``size=7.5`` and ``signs=8192``, and replaces lambda
by a gate per token, a part of dense connections that are not implemented here.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from pydantic import Field

from minillm_core import Buffer, Geometry, Layers, Learned, Module, Param, Plugin, option, zeros

__all__ = ["BigramHash", "Signed", "Table", "drawn_signs", "hashed", "rows_of", "signed"]

ROLE = "embedding.bigram"
HERE, BEFORE = 36313, 27191
"""Hash multipliers of the records: odd and coprime."""

Beta = Annotated[float, Field(ge=0, lt=1)]


class BigramHash(Plugin, api=1, identity_at_init=True, unweighted=True):
    """An embedding of each pair of neighbouring tokens, hashed, at the entry of the layers."""

    size: float = option(
        5.0,
        gt=0,
        le=1000,
        search=(1.0, 2.0, 5.0, 10.0),
        help="rows of the table, as a multiple of the vocabulary",
    )
    signs: int = option(
        0,
        ge=0,
        le=2**20,
        help="rows of random signs that distinguish pairs in one row, such as 8192; 0: none",
    )
    layers: Layers = option("all", help='layers at whose input it is added: "all", [0, -1]')
    behind_attention: bool = option(
        False, help="add it after attention instead of before, except in the model's first layer"
    )
    start: float = option(0.05, help="initial learned coefficient at each of those layers")
    lr_mul: float = option(
        75.0, ge=0, search=(25.0, 75.0, 150.0), help="factor on the table's learning rate"
    )
    wd_mul: float = option(0.0, ge=0, help="factor on the table's weight decay")
    betas: tuple[Beta, Beta] | None = option(
        (0.75, 0.95), help="AdamW's betas for the table; none: train.betas"
    )
    coefficient_lr_mul: float = option(
        1.0, ge=0, help="factor on the learning rate of the coefficients"
    )

    def build_data(self, data):
        data.field("bigram", "int32")
        if self.signs:
            data.field("bigram_sign", "int32")

    def on_batch(self, batch, phase, vocab):
        fields = {"bigram": hashed(batch["ids"], rows_of(vocab, self.size))}
        if self.signs:
            fields["bigram_sign"] = signed(batch["ids"], self.signs)
        return {**batch, **fields}

    def build_model(self, model):
        table = {"size": self.size, "lr_mul": self.lr_mul, "wd_mul": self.wd_mul}
        if self.signs:
            model.stream("bigram_embedding", Signed, signs=self.signs, **table)
        else:
            model.stream("bigram_embedding", Table, **table)
        for layer in self.layers.resolve(model.layers):
            coefficient = Learned(self.start, lr_mul=self.coefficient_lr_mul)
            site = "mid" if self.behind_attention and layer > 0 else "in"
            model.residual(f"layers.{layer}.{site}", "bigram_embedding", coefficient)

    def optimizer_factory(self, optimizer):
        if self.betas is not None:
            optimizer.set(lambda _, p: p.role == ROLE, betas=self.betas)


def rows_of(vocab: int, size: float) -> int:
    """Return the number of table rows: at least two, the last for the first column of a row."""
    return max(2, round(vocab * size))


def hashed(ids: np.ndarray, rows: int) -> np.ndarray:
    """Hash ids int32 (B, T) -> int32 (B, T), below ``rows``."""
    wide = ids.astype(np.int64)
    pairs = (HERE * wide[:, 1:]) ^ (BEFORE * wide[:, :-1])
    first = np.full((len(ids), 1), rows - 1)
    return np.concatenate([first, pairs % (rows - 1)], 1).astype(np.int32)


def signed(ids: np.ndarray, rows: int) -> np.ndarray:
    """Hash ids int32 (B, T) -> int32 (B, T): each pair's row of signs, below ``rows``."""
    pairs = (ids[:, 1:] ^ ids[:, :-1]) % rows
    return np.concatenate([np.zeros((len(ids), 1), np.int32), pairs], 1).astype(np.int32)


def drawn_signs(rows: int, width: int) -> np.ndarray:
    """Draw signs float32 (rows, width), -1 and 1: equal in every run, since checkpoints do not store them."""
    words = np.random.Philox(key=rows).random_raw(-(-rows * width // 64))
    bits = np.unpackbits(words.astype("<u8").view(np.uint8), count=rows * width)
    return bits.reshape(rows, width).astype(np.float32) * 2 - 1


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
            rows="bigram",
        )

    def forward(self, bigram: Any) -> Any:
        """bigram int32 (B, T) -> (B, T, C)."""
        return self.ops.embedding(bigram, self.weight)


class Signed(Table):
    """bigram, bigram_sign int32 (B, T) -> (B, T, C)."""

    def __init__(
        self, geometry: Geometry, size: float, lr_mul: float, wd_mul: float, signs: int
    ) -> None:
        super().__init__(geometry, size, lr_mul, wd_mul)
        shape = (signs, geometry.dim)
        self.signs = Buffer(shape, lambda: drawn_signs(*shape))

    def forward(self, bigram: Any, bigram_sign: Any) -> Any:
        """bigram, bigram_sign int32 (B, T) -> (B, T, C)."""
        ops, row = self.ops, super().forward(bigram)
        signs = ops.take(self.signs, ops.reshape(bigram_sign, (-1,)), 0)
        return ops.where(ops.reshape(signs, row.shape) > 0, row, -row)
