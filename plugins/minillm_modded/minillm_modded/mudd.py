"""MUDD: dense connections; q, k, v and the stream each read their own mix of earlier outputs (arXiv:2502.12170).

    A       = s GELU(RMSNorm(X_i) W1) W2 + a                        per token, from X_i
    X_i^w   = sum over j <= i of A_wj X_j                           w: q, k, v, residual
    block i = attention(norm X_i^q, norm X_i^k, norm X_i^v) added to X_i^residual, then the MLP

X_0 is the embedding, X_i the output of block i - 1. W2 is 0 at the start and a is 1 for X_i, 0 for the
others: the model starts unchanged. Before the last norm the stream is mixed once more. A single residual
stream must carry everything that later layers may need; here each input selects it.

The residual input is written as the stream plus sum over j <= i of A_j X_j, less X_i: a sum beside the
stream, whose own coefficient stays free for another plugin (``embed_skip``). What others add at
layers.i.in, or multiply the stream by there, is in the residual input alone.

W1 has as many rows as A has numbers, unless ``hidden`` is set. The records of
modded-nanogpt (81, 85) use 64, ``scale`` 0.1, ``lr_mul`` 0.25 and few ``sources``. GELU is the
tanh approximation; q, k and v share the attention's norm, whose weight their matrices can absorb.
"""

from __future__ import annotations

from math import pi, sqrt
from typing import Annotated, Any, Literal

from pydantic import Field

from minillm_core import Layers, Linear, Module, Param, PlanError, Plugin, option, zeros

__all__ = ["MUDD", "Coefficient", "Coefficients", "Current"]

Way = Literal["q", "k", "v", "residual"]
WAYS: tuple[Way, ...] = ("q", "k", "v", "residual")


class MUDD(Plugin, api=1, identity_at_init=True):
    """Inputs of q, k and v, and the stream, are sums of all earlier outputs, weighed for each token."""

    ways: Annotated[tuple[Way, ...], Field(min_length=1)] = option(
        WAYS, help="inputs with a mix of their own: q, k, v of attention, and residual (the stream)"
    )
    sources: Layers = option(
        "all", help='blocks whose outputs later blocks read: "all", "every:2", [0, 3]'
    )
    layers: Layers = option("all", help="blocks with mixed inputs; the first has nothing to mix")
    last: bool = option(True, help="mix the stream before the last norm as well")
    hidden: int | None = option(
        None, ge=1, help="hidden width of the MLP; none: the number of coefficients"
    )
    scale: float = option(1.0, gt=0, help="factor on the token-dependent part of the coefficients")
    lr_mul: float = option(1.0, gt=0, help="factor on the learning rate of the coefficients")

    def build_model(self, model):
        sources = self.sources.resolve(model.layers)
        mixing = [layer for layer in self.layers.resolve(model.layers) if layer]
        if model.layers < 2:
            raise PlanError(
                f"mudd mixes outputs of several blocks, but the model has {model.layers}",
                where=f"model.layers={model.layers}",
                fix="model.layers=2 or more, or leave mudd out",
            )
        for layer in mixing:
            self._mix(model, layer, f"layers.{layer}.in", sources, self.ways)
        if self.last and "residual" in self.ways:
            self._mix(model, model.layers, "final", sources, ("residual",))

    def _mix(
        self, model: Any, block: int, site: str, sources: tuple[int, ...], ways: tuple[Way, ...]
    ) -> None:
        """Mix the inputs of block ``block``, by coefficients computed at ``site``."""
        earlier = ["x0", *(model.tap(f"layers.{one}.out") for one in sources if one < block - 1)]
        own, name, count = f"mudd_own_{block}", f"mudd_{block}", len(earlier) + 1
        given = {"hidden": self.hidden, "scale": self.scale, "lr_mul": self.lr_mul}
        model.stream(own, Current, at=site)  # in a layer loop not always the last block's output
        model.stream(name, Coefficients, at=site, count=count * len(ways), **given)

        def add(slot: Any, place: str, source: str, index: int, start: float) -> None:
            slot(place, source, Coefficient, reads={"mixed": name}, index=index, start=start)

        if {"q", "k", "v"} <= {*ways}:  # another plugin's attention inputs would have no effect
            model.input(f"layers.{block}.attention", "carry", 1.0)
        for at, way in enumerate(ways):
            if way == "residual":
                slot, place, current = model.residual, site, 0.0  # beside the stream itself
            else:
                slot, place, current = model.input, f"layers.{block}.attention.{way}", 1.0
                slot(place, "carry", 0.0)  # the stream there may already be mixed
            for index, source in enumerate(earlier):
                add(slot, place, source, at * count + index, 0.0)
            add(slot, place, own, at * count + count - 1, current)


class Current(Module):
    """X_i, the stream that enters a block: x (B, T, C) -> (B, T, C)."""

    def forward(self, x: Any) -> Any:
        """x (B, T, C) -> (B, T, C)."""
        return x


class Coefficients(Module):
    """All coefficients of a block: x (B, T, C) -> (B, T, N); 0 at the start."""

    def __init__(
        self, geometry: Any, count: int, hidden: int | None, scale: float, lr_mul: float
    ) -> None:
        super().__init__()
        width, self.scale, self.eps = hidden or count, scale, geometry.norm_eps
        self.up = Linear(geometry.dim, width, role="gate", lr_mul=lr_mul)
        self.down = Linear(width, count, role="gate", init=zeros, lr_mul=lr_mul)
        self.bias = Param((count,), init=zeros, role="gate", lr_mul=lr_mul, wd_mul=0.0)

    def forward(self, x: Any) -> Any:
        """x (B, T, C) -> (B, T, N)."""
        ops: Any = self.ops
        hidden = gelu(ops, self.up(ops.rms_norm(x, None, self.eps)))  # (B, T, hidden)
        return self.down(hidden) * self.scale + self.bias


class Coefficient(Module):
    """One coefficient of a block, added to its initial value."""

    def __init__(self, index: int, start: float) -> None:
        super().__init__()
        self.index, self.start = index, start

    def forward(self, mixed: Any) -> Any:
        """mixed (B, T, N) -> (B, T, 1)."""
        return mixed[..., self.index : self.index + 1] + self.start


def gelu(ops: Any, x: Any) -> Any:
    """x Phi(x), Phi approximated by tanh."""
    return 0.5 * x * (1.0 + ops.tanh(sqrt(2.0 / pi) * (x + 0.044715 * x * x * x)))
