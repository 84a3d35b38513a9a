"""Value embeddings: every token adds values looked up by its id to those computed from its context.

    v <- v + 2 sigmoid(w x[:gate_width]) table[id]         "gates", one per head (nanochat)
    v <- l0 v + l1 table[id]                               "lambdas" (modded-nanogpt, 2025-01-04)

A table (V, K D) is looked up once per step, without FLOPs. The record's three tables serve the first
three and the last three layers, in the same order (0 1 2 ... 0 1 2); after an idea of value residual
learning (arXiv:2410.17897). Each row is updated rarely, so that the learning rate is high. Where
``train.lr`` is 0.003, 75 times that is the 0.2 of nanochat; decay would also be 75 times as high, and
is disabled. With ``sparse_rows``, only the rows that a step looks up are read and updated.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from minillm_core import (
    Constant,
    Geometry,
    Layers,
    Linear,
    Module,
    Normal,
    Param,
    PlanError,
    Plugin,
    option,
    zeros,
)

__all__ = ["Gated", "Mixed", "Table", "ValueEmbeds"]

ROLE = "embedding.value"
GATE_WIDTH = 12
Beta = Annotated[float, Field(ge=0, lt=1)]


class ValueEmbeds(Plugin, api=1):
    """Tables of values by token, added to v in the first and last layers, with a gate per head."""

    tables: int | None = option(
        None,
        ge=1,
        help="number of tables, each shared by one of the first and one of the last layers; none: "
        "three, or fewer in a model of fewer than six layers",
    )
    layers: Layers | None = option(
        None, help="layers with a table each, not shared, instead of tables"
    )
    mix: Literal["gates", "lambdas"] = option(
        "gates", help="v + 2 sigmoid(w x) table, or l0 v + l1 table from 0.5 and 0.5"
    )
    gate_width: int = option(GATE_WIDTH, ge=1, help="number of features of x that a gate reads")
    std: float | None = option(
        None,
        ge=0,
        help="initial standard deviation of the tables; none: dim^-1/2 with gates, 1 with lambdas",
    )
    lr_mul: float = option(
        75.0, ge=0, search=(25.0, 75.0, 150.0), help="factor on the tables' learning rate"
    )
    wd_mul: float = option(0.0, ge=0, help="factor on the tables' weight decay")
    betas: tuple[Beta, Beta] | None = option(
        (0.75, 0.95), help="AdamW's betas for the tables; none: train.betas"
    )

    @model_validator(mode="after")
    def _one_of_two(self) -> ValueEmbeds:
        if self.tables is not None and self.layers is not None:
            raise ValueError("tables are shared by first and last layers, layers have their own")
        return self

    @model_validator(mode="after")
    def _width_is_of_gates(self) -> ValueEmbeds:
        if self.mix == "lambdas" and self.gate_width != GATE_WIDTH:
            raise ValueError("gate_width is for mix gates; lambdas have none")
        return self

    def build_attention(self, attn):
        table = self._table_of(attn.layers).get(attn.layer)
        if table is None:
            return
        reads = {"table": f"value_embedding_{table}"}
        if self.mix == "lambdas":
            attn.v(Mixed, reads=reads)
        else:
            attn.v(Gated, reads=reads, width=self.gate_width)

    def build_model(self, model):
        if self.mix == "gates" and self.gate_width > model.dim:
            raise PlanError(
                f"value_embeds.gate_width={self.gate_width}: x has {model.dim} features",
                where=f"model.dim={model.dim}",
                fix=f"value_embeds.gate_width={model.dim}, or less",
            )
        std = {"gates": model.dim**-0.5, "lambdas": 1.0}[self.mix] if self.std is None else self.std
        for table in sorted(set(self._table_of(model.layers).values())):
            model.stream(
                f"value_embedding_{table}", Table, std=std, lr_mul=self.lr_mul, wd_mul=self.wd_mul
            )

    def optimizer_factory(self, optimizer):
        if self.betas is not None:
            optimizer.set(lambda _, p: p.role == ROLE, betas=self.betas)

    def _table_of(self, layers: int) -> dict[int, int]:
        """Map each layer to its table."""
        if self.layers is not None:
            return {layer: table for table, layer in enumerate(self.layers.resolve(layers))}
        tables = min(3, max(1, layers // 2)) if self.tables is None else self.tables
        if tables > max(1, layers // 2):
            raise PlanError(
                f"value_embeds.tables={tables}: each is for two of the model's {layers} layers",
                fix=f"value_embeds.tables={max(1, layers // 2)}, or less",
            )
        first, last = range(tables), range(layers - tables, layers)
        return {**dict(zip(last, first, strict=True)), **dict(zip(first, first, strict=True))}


class Table(Module):
    """A table of values: ids int32 (B, T) -> (B, T, K D)."""

    def __init__(self, geometry: Geometry, std: float, lr_mul: float, wd_mul: float) -> None:
        super().__init__()
        self.weight = Param(
            (geometry.vocab, geometry.kv_heads * geometry.head_dim),
            axes=("vocab", "kv_heads"),
            init=Normal(std),
            role=ROLE,
            lr_mul=lr_mul,
            wd_mul=wd_mul,
            rows="ids",
        )

    def forward(self, ids: Any) -> Any:
        """ids int32 (B, T) -> (B, T, K D)."""
        return self.ops.embedding(ids, self.weight)


class Gated(Module):
    """A gated value embedding: v (B, T, K, D), table (B, T, K D), gates from x (B, T, C) -> the term added to v."""

    def __init__(self, geometry: Geometry, width: int) -> None:
        super().__init__()
        self.width = width
        axes = ("kv_heads", "gate")
        self.gate = Linear(width, geometry.kv_heads, role="gate", axes=axes, init=zeros, wd_mul=0.0)

    def forward(self, v: Any, x: Any, table: Any) -> Any:
        """Return (B, T, K, D)."""
        gate = 2.0 * self.ops.sigmoid(self.gate(x[..., : self.width]))  # (B, T, K)
        return gate[..., None] * self.ops.reshape(table, v.shape)


class Mixed(Module):
    """A mixed value embedding: v (B, T, K, D), table (B, T, K D) -> the term added to v for l0 v + l1 table."""

    def __init__(self) -> None:
        super().__init__()
        self.l0 = Param((1,), init=Constant(0.5), role="scalar", wd_mul=0.0)
        self.l1 = Param((1,), init=Constant(0.5), role="scalar", wd_mul=0.0)

    def forward(self, v: Any, table: Any) -> Any:
        """Return (B, T, K, D)."""
        l0: Any = self.l0  # an array at this point
        return (l0 - 1.0) * v + self.l1 * self.ops.reshape(table, v.shape)
