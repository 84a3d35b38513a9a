"""Mixture of experts: a router sends each token to some of many MLPs.

    p    = softmax(router(x))                              (B, T, E)
    y_t  = sum over the k experts with the largest p_t + bias of weight_e expert_e(x_t)

Switch Transformer (arXiv:2101.03961): k = 1, weight = p; for larger k the weights are p divided by
their sum. An expert's capacity is ``capacity`` times its even share of a row's tokens, the first ones;
further tokens get no output from it. So a token depends on no later token and on no other row.
Two mechanisms balance the load: the balance loss, E sum_e f_e p_e with f the fraction of choices
and p the mean probability in a row, which is 1 at perfect balance; and a bias that affects the choice
of experts but not their weights: after each step it moves by ``bias_rate`` towards experts that
were chosen too rarely (arXiv:2408.15664).

Every expert is a SwiGLU of separate linear modules, so that Muon treats them like all others. Shapes
do not depend on the routing: each expert always multiplies a full capacity of tokens.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np

from minillm_core import (
    EVERYTHING,
    Buffer,
    Geometry,
    Layers,
    Linear,
    Module,
    Normal,
    PlanError,
    Plugin,
    State,
    option,
    zeros,
)

__all__ = ["Expert", "Experts", "MoE"]


class MoE(Plugin, api=1, discrete=True):
    """A router sends each token through one or a few of many MLPs, with balanced loads."""

    experts: int = option(4, ge=2, le=1024, search=(4, 8), help="experts (MLPs) per layer")
    chosen: int = option(1, ge=1, help="experts per token")
    hidden: int | None = option(
        None, ge=1, help="hidden width of an expert; none: model.hidden / chosen, for equal FLOPs"
    )
    capacity: float = option(
        1.25,
        gt=0,
        help="capacity of an expert, as a multiple of its even share of a row's tokens; further "
        "tokens are dropped",
    )
    balance: float = option(0.01, ge=0, help="weight of the balance loss")
    bias_rate: float = option(
        0.001, ge=0, help="change of the router's bias per step; 0: no change"
    )
    lr_mul: float = option(1.0, gt=0, help="factor on the router's learning rate")
    layers: Layers = option("every:2", help='layers with experts: "all", "every:2", [-1]')

    def build_model(self, model):
        if self.chosen > self.experts:
            raise PlanError(
                f"moe.chosen={self.chosen} of moe.experts={self.experts}",
                fix=f"moe.chosen={self.experts}, or less",
            )
        for layer in self.layers.resolve(model.layers):
            model.mlp(
                layer,
                Experts,
                experts=self.experts,
                chosen=self.chosen,
                hidden=self.hidden or ceil(model.hidden / self.chosen),
                capacity=self.capacity,
                bias_rate=self.bias_rate,
                lr_mul=self.lr_mul,
            )

    def compute_loss(self, loss):
        if self.balance:
            loss.term("balance", emitted="balance", weight=self.balance)


class Experts(Module):
    """A layer's experts: x (B, T, C) -> (B, T, C), the balance loss () and the experts' loads (E,)."""

    terms = ("balance",)
    statistics = {"load": "sum"}  # noqa: RUF012

    def __init__(
        self,
        geometry: Geometry,
        experts: int,
        chosen: int,
        hidden: int,
        capacity: float,
        bias_rate: float,
        lr_mul: float,
    ) -> None:
        super().__init__()
        E, row = experts, geometry.positions
        self.count, self.chosen, self.bias_rate = E, chosen, bias_rate
        self.capacity = min(row, ceil(capacity * chosen * row / E))  # tokens of a row
        if self.capacity < row:  # whether a token is dropped depends on all earlier tokens
            self.lookback = EVERYTHING
        self.router = Linear(
            geometry.dim,
            E,
            role="router",
            axes=("experts", "dim"),
            init=Normal(0.1 * geometry.dim**-0.5),  # a tenth of the usual, as in Switch
            lr_mul=lr_mul,
            wd_mul=0.0,
        )
        share = min(1.0, capacity * chosen / E)
        inner = replace(geometry, hidden=hidden)
        self.experts = [Expert(inner, share) for _ in range(E)]
        self.bias = State((E,), zeros)
        self.before = Buffer((E, E), lambda: np.triu(np.ones((E, E), np.float32), 1))

    def forward(self, x: Any) -> Any:
        """x (B, T, C) -> (B, T, C), balance (), load (E,)."""
        ops, (B, T, C), E, k = self.ops, x.shape, self.count, self.chosen
        logits = ops.astype(self.router(x), "float32")
        p = ops.exp(logits - ops.logsumexp(logits, -1, keepdims=True))  # (B, T, E)
        best = ops.argsort(-(ops.stop_gradient(p) + self.bias), -1)
        choice = ops.split(best, [k, E - k], -1)[0] if k < E else best  # (B, T, k)
        weight = ops.take_along_axis(p, choice, -1)
        if k > 1:
            weight = weight / ops.sum(weight, -1, keepdims=True)
        hits = ops.expand_dims(choice, -1) == ops.arange(E)  # (B, T, k, E)
        counts = ops.sum(ops.astype(hits, "float32"), (1, 2))  # (B, E)

        token, slot, kept = self.places(ops.reshape(choice, (B, T * k)), counts)
        sent = ops.take(ops.reshape(x, (B * T, C)), token, 0)  # (E B cap, C)
        parts = zip(self.experts, ops.split(sent, E, 0), strict=True)
        made = ops.concat([expert(part) for expert, part in parts], 0)
        back = ops.reshape(ops.take(made, slot, 0), (B, T, k, C))
        weight = ops.reshape(kept, (B, T, k)) * weight
        y = ops.sum(back * ops.expand_dims(ops.like(weight, x), -1), 2)

        load = ops.sum(counts, 0)
        share = ops.stop_gradient(counts) / (T * k)
        balance = E * ops.mean(ops.sum(share * ops.mean(p, 1), -1))
        return y, balance, load

    def places(self, choice: Any, counts: Any) -> tuple[Any, Any, Any]:
        """Assign tokens to slots: every expert takes the first ``capacity`` tokens of a row that chose it.

        Args:
            choice: int32 (B, M), the experts of each token's choices, M = T k, tokens in order.
            counts: float32 (B, E), number of tokens that chose each expert.

        Returns:
            int32 (E B cap,), the token in each slot of each expert, arbitrary for unused slots;
            int32 (B M,), the slot of each choice; float32 (B, M), 1 where the choice has a slot, else 0.
        """
        ops, (B, M), E, cap = self.ops, choice.shape, self.count, self.capacity
        rows = ops.expand_dims(ops.arange(B), -1)  # (B, 1)
        order = ops.argsort(choice * M + ops.arange(M), -1)  # (B, M): by expert, then by token
        starts = ops.sum(ops.expand_dims(counts, -1) * self.before, 1)  # (B, E)
        starts = ops.astype(starts, "int32")

        index = ops.minimum(ops.expand_dims(starts, -1) + ops.arange(cap), M - 1)  # (B, E, cap)
        held = ops.take_along_axis(order, ops.reshape(index, (B, E * cap)), 1)
        tokens = ops.broadcast_to(
            ops.expand_dims(ops.arange(M // self.chosen), -1), (M // self.chosen, self.chosen)
        )
        token = ops.reshape(
            ops.take(ops.reshape(tokens, (M,)), ops.reshape(held, (-1,)), 0), (B, -1)
        )
        token = ops.reshape(token + rows * (M // self.chosen), (B, E, cap))

        place = ops.argsort(order, -1) - ops.take_along_axis(
            starts, choice, 1
        )  # among its expert's
        slot = (choice * B + rows) * cap + ops.minimum(place, cap - 1)
        kept = ops.astype(place < cap, "float32")
        by_expert = ops.permute_dims(token, (1, 0, 2))
        return ops.reshape(by_expert, (-1,)), ops.reshape(slot, (-1,)), kept

    def next_state(self, load: Any) -> dict[str, Any]:
        """Return the bias, moved towards experts that were chosen too rarely; load (E,) over the step."""
        fair = self.ops.sum(load) / self.count
        up = self.ops.where(load < fair, self.bias_rate, 0.0)
        down = self.ops.where(load > fair, self.bias_rate, 0.0)
        return {"bias": self.bias + up - down}


class Expert(Module):
    """One expert, a SwiGLU: x (..., C) -> down(silu(gate(x)) * up(x)) (..., C)."""

    def __init__(self, geometry: Geometry, share: float) -> None:
        super().__init__()
        C, F = geometry.dim, geometry.hidden
        self.gate = Linear(C, F, role="mlp.gate", axes=("hidden", "dim"), share=share)
        self.up = Linear(C, F, role="mlp.up", axes=("hidden", "dim"), share=share)
        self.down = Linear(
            F,
            C,
            role="mlp.down",
            axes=("dim", "hidden"),
            init=Normal((F * 2 * geometry.layers) ** -0.5),  # the plain MLP's
            share=share,
        )

    def forward(self, x: Any) -> Any:
        """x (..., C) -> (..., C)."""
        return self.down(self.ops.swiglu(self.gate(x), self.up(x)))
