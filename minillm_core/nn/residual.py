"""Residual sites: one update of the stream, the sum over sources of coefficient x source."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minillm_core.nn.init import Constant
from minillm_core.nn.module import Module
from minillm_core.nn.node import ModelShape, Node, Scope, Setting, inputs_of
from minillm_core.nn.param import Param


@dataclass(frozen=True)
class Learned:
    """A coefficient that is a trained scalar."""

    start: float
    lr_mul: float = 1.0
    wd_mul: float = 0.0


@dataclass(frozen=True)
class SiteSpec:
    """A residual site: source -> coefficient, sources sorted, since float sums depend on the order."""

    name: str  # layers.i.in, .mid, .out, final
    terms: tuple[tuple[str, str, Setting | Learned | Node], ...] = field(default=())
    """(source, owner, coefficient); sources: carry, sublayer, a stream, a tap."""

    @property
    def inputs(self) -> set[str]:
        """The site's inputs besides carry and sublayer."""
        names = {source for source, _, _ in self.terms} - {"carry", "sublayer"}
        return names.union(*(inputs_of(coefficient) for _, _, coefficient in self.terms))


class LearnedScalar(Module):
    """A trained number."""

    def __init__(self, start: float, lr_mul: float, wd_mul: float) -> None:
        super().__init__()
        self.scalar = Param((1,), init=Constant(start), role="scalar", lr_mul=lr_mul, wd_mul=wd_mul)

    def forward(self) -> Any:
        """Return the number, (1,)."""
        return self.scalar


class Site(Module):
    """A residual site: carry (B, T, C), sublayer (B, T, C) or None -> (B, T, C)."""

    def __init__(self, geometry: ModelShape, spec: SiteSpec) -> None:
        super().__init__()
        self.sources = tuple(source for source, _, _ in spec.terms)
        self.settings = {
            source: coefficient
            for source, _, coefficient in spec.terms
            if isinstance(coefficient, Setting)
        }
        coefficients: dict[str, Module] = {}
        for source, owner, coefficient in spec.terms:
            if isinstance(coefficient, Node):
                coefficients[child(source)] = coefficient.make(geometry)
            elif isinstance(coefficient, Learned):
                scalar = LearnedScalar(coefficient.start, coefficient.lr_mul, coefficient.wd_mul)
                scalar.bound, scalar.owner = (), owner
                coefficients[child(source)] = scalar
        self.coefficients = coefficients

    def forward(self, carry: Any, sublayer: Any, scope: Scope) -> Any:
        """Sum the sources; carry and sublayer have coefficient 1 unless claimed."""
        own = {"carry": carry, "sublayer": sublayer, "x": carry}
        x = self.scaled("carry", carry, own, scope) if "carry" in self.sources else carry
        if sublayer is not None:
            claimed = "sublayer" in self.sources
            x = x + (self.scaled("sublayer", sublayer, own, scope) if claimed else sublayer)
        for source in self.sources:
            if source not in ("carry", "sublayer"):
                x = x + self.scaled(source, scope.reads[source], own, scope)
        return x

    def scaled(self, source: str, value: Any, own: dict[str, Any], scope: Scope) -> Any:
        """Multiply coefficient and value, in value's dtype."""
        if source in self.settings:
            number = self.settings[source].of(scope.reads)
            return value * self.ops.like(number, value)
        return value * scope.apply(self.coefficients[child(source)], own)


def child(source: str) -> str:
    """Name the child module of a source: a tap's name has dots."""
    return source.replace(".", "_")
