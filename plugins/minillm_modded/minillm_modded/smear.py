"""Smear: a gated fraction of the previous token's embedding is added to each one (modded-nanogpt, record 34).

    x_t <- x_t + lambda sigmoid(w . x_t[:12]) x_(t-1)      lambda = 0 and w = 0 at the start

Heads need not learn to attend to the previous token, the first step of induction (by
classiclarryd). The records train w at a hundredth of their Adam's learning rate and lambda at 5
times it, without decay. They smear the last token of one document into the first of the next; here
it stays within its document unless ``across`` is set.
"""

from __future__ import annotations

from typing import Any

from minillm_core import Linear, Module, Param, PlanError, Plugin, option, zeros

__all__ = ["Smear", "SmearAcross", "SmearWithin"]


class Smear(Plugin, api=1, identity_at_init=True):
    """A gated share of the previous token's embedding is added to each one."""

    width: int = option(12, ge=1, help="number of features of the embedding that the gate reads")
    across: bool = option(False, help="smear across document boundaries, as the records do")
    lr_mul: float = option(5.0, gt=0, help="factor on the learning rate of lambda")
    gate_lr_mul: float = option(0.01, gt=0, help="factor on the learning rate of w")

    def build_model(self, model):
        if self.width > model.dim:
            raise PlanError(
                f"smear reads {self.width} features of a stream of {model.dim}",
                where=f"smear.width={self.width}",
                fix=f"smear.width={model.dim} at most",
            )
        model.embed.mix(
            SmearAcross if self.across else SmearWithin,
            width=self.width,
            lr_mul=self.lr_mul,
            gate_lr_mul=self.gate_lr_mul,
        )


class SmearAcross(Module):
    """Smear across documents: x (B, T, C) -> x + lambda gate x shifted by one column."""

    lookback = 1

    def __init__(self, width: int, lr_mul: float, gate_lr_mul: float) -> None:
        super().__init__()
        self.width = width
        self.scalar = Param((1,), init=zeros, role="scalar", lr_mul=lr_mul, wd_mul=0.0)
        self.gate = Linear(
            width,
            1,
            role="gate",
            axes=("one", "gate"),
            init=zeros,
            lr_mul=gate_lr_mul,
            wd_mul=0.0,
        )

    def forward(self, x: Any) -> Any:
        """x (B, T, C) -> (B, T, C)."""
        first = self.ops.zeros_like(x[:, :1])
        return self.smeared(x, self.ops.concat([first, x[:, :-1]], 1))

    def smeared(self, x: Any, previous: Any) -> Any:
        """Add the gated ``previous`` (B, T, C) to x (B, T, C)."""
        gate = self.ops.sigmoid(self.gate(x[..., : self.width]))  # (B, T, 1)
        return x + self.scalar * gate * previous


class SmearWithin(SmearAcross):
    """Smear within documents: nothing is added to the first token of a document."""

    def forward(self, x: Any, documents: Any) -> Any:
        """x (B, T, C), documents int32 (B, T) -> (B, T, C)."""
        ops = self.ops
        first = ops.zeros_like(x[:, :1])
        same = ops.expand_dims(documents[:, 1:] == documents[:, :-1], -1)  # (B, T - 1, 1)
        previous = ops.where(same, x[:, :-1], ops.zeros_like(x[:, :-1]))
        return self.smeared(x, ops.concat([first, previous], 1))
