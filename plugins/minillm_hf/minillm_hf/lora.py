"""Low-rank adapters (LoRA, arXiv:2106.09685): training of a low-rank change of each weight matrix.

    y <- x W^T + (alpha / rank) (x A^T) B^T        A (rank, in), B (out, rank)

B starts at 0, so the model is unchanged at first. All other parameters are frozen: no gradient and no
optimizer state. ``minillm export`` folds the products into W, or writes the adapters alone, for PEFT
(``--layout peft``).

Adapters need about ten times the learning rate of full fine-tuning, whatever the rank, and work best on
every matrix, not only those of attention (thinkingmachines.ai/blog/lora, 2025).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_validator

from minillm_core import Layers, Module, Normal, Param, PlanError, Plugin, option, zeros

__all__ = ["ROLE", "LoRA", "LowRank"]

Target = Literal["q", "k", "v", "o", "gate", "up", "down"]
TARGETS: tuple[Target, ...] = ("q", "k", "v", "o", "gate", "up", "down")
Whole = Literal["embedding", "head", "norms"]
WHOLE: Mapping[Whole, str] = {"embedding": "embedding.token", "head": "head", "norms": "norm"}
"""Parts that may be trained in full -> the role of their parameters."""
ROLE = "lora"
"""Prefix of the roles of adapter parameters, before ``.a`` and ``.b``."""


class LoRA(Plugin, api=1, export="llama", identity_at_init=True):
    """Trains low-rank changes of the matrices, and freezes everything else."""

    rank: int = option(16, ge=1, help="rank of the change: rows of A, columns of B")
    alpha: float = option(32.0, gt=0, help="scale: the change is multiplied by alpha / rank")
    targets: Annotated[tuple[Target, ...], Field(min_length=1)] = option(
        TARGETS, help="matrices with an adapter: q, k, v, o of attention, gate, up, down of the MLP"
    )
    layers: Layers = option("all", help='layers with adapters: "all", [0, -1], "every:2"')
    lr_mul: float = option(10.0, gt=0, help="factor on the learning rate (train.lr)")
    train: tuple[Whole, ...] = option(
        (), help="modules that are fully trained as well: embedding, head, norms"
    )

    @field_validator("targets", "train")
    @classmethod
    def _each_once(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        if twice := sorted({one for one in targets if targets.count(one) > 1}):
            raise ValueError(f"{twice[0]} is named twice")
        return targets

    def build_model(self, model):
        queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
        features = {  # inputs, outputs
            "attention.q": (model.dim, queries),
            "attention.k": (model.dim, keys),
            "attention.v": (model.dim, keys),
            "attention.o": (queries, model.dim),
            "mlp.gate": (model.dim, model.hidden),
            "mlp.up": (model.dim, model.hidden),
            "mlp.down": (model.hidden, model.dim),
        }
        for layer in self.layers.resolve(model.layers):
            for leaf, (taken, given) in features.items():
                if leaf.partition(".")[2] in self.targets:
                    model.linear(
                        f"layers.{layer}.{leaf}",
                        LowRank,
                        in_features=taken,
                        out_features=given,
                        rank=self.rank,
                        alpha=self.alpha,
                        lr_mul=self.lr_mul,
                    )

    def optimizer_factory(self, optimizer):
        trained = {WHOLE[one] for one in self.train}
        roles = {info.role for info in optimizer.parameters.values()}
        for one in self.train:
            if WHOLE[one] not in roles:
                raise PlanError(
                    f"lora.train names {one}, but the model has no such parameters",
                    where=f"lora.train={[*self.train]}",
                    fix="name embedding instead, which a tied head shares"
                    if one == "head"
                    else f"leave {one} out",
                )
        optimizer.freeze(
            lambda name, info: not info.role.startswith(f"{ROLE}.") and info.role not in trained,
            over=True,  # a rule for whole matrices (Muon) keeps the adapters
        )


class LowRank(Module):
    """A linear layer's product plus its low-rank change: x (..., I), weight (O, I) -> (..., O).

    Args:
        in_features: I.
        out_features: O.
        rank: of the change.
        alpha: alpha / rank multiplies it.
        lr_mul: factor on the learning rate of both matrices.
    """

    def __init__(
        self, in_features: int, out_features: int, rank: int, alpha: float, lr_mul: float
    ) -> None:
        super().__init__()
        self.rank, self.alpha, self.scale = rank, alpha, alpha / rank
        self.a = Param(
            (rank, in_features),
            axes=("rank", "in"),
            init=Normal(in_features**-0.5),
            role=f"{ROLE}.a",
            lr_mul=lr_mul,
        )
        self.b = Param(
            (out_features, rank),
            axes=("out", "rank"),
            init=zeros,
            role=f"{ROLE}.b",
            lr_mul=lr_mul,
        )

    def forward(self, x: Any, weight: Any) -> Any:
        """x (..., I), weight (O, I) -> (..., O)."""
        change = self.ops.linear(self.ops.linear(x, self.a), self.b)
        return self.ops.linear(x, weight) + change * self.scale

    def folded(self, weight: np.ndarray, own: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the merged weight (O, I), float32: its plain product equals this module's."""
        change = own["b"].astype(np.float64) @ own["a"].astype(np.float64)
        return (weight + self.scale * change).astype(np.float32)
