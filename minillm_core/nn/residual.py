"""Residual sites: one update of the residual stream, the sum over sources of coefficient x source.

The input of attention, of its q, k and v, and of the MLP may be such a sum as well; it is not written
to the stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minillm_core.errors import PluginCodeError
from minillm_core.nn.init import Constant
from minillm_core.nn.module import Module
from minillm_core.nn.node import ModelShape, Node, Scope, Setting, check_dtype, inputs_of, unusable
from minillm_core.nn.param import Param
from minillm_core.ops.arrays import dtype_name


@dataclass(frozen=True)
class Learned:
    """A learned scalar coefficient: its initial value and optimizer factors."""

    start: float
    lr_mul: float = 1.0
    wd_mul: float = 0.0


@dataclass(frozen=True)
class SiteSpec:
    """A residual site, as data: source -> coefficient, sources sorted, since float sums depend on the order."""

    name: str  # layers.i.in, .mid, .out, final; of an input: layers.i.attention, .attention.q, .mlp
    terms: tuple[tuple[str, str, Setting | Learned | Node], ...] = field(default=())
    """(source, owner, coefficient); sources: carry, sublayer, a stream, a tap; several owners may use the
    same source."""
    computed: tuple[Node, ...] = ()
    """Streams that are computed here, before the sum, each after those that it reads."""

    @property
    def inputs(self) -> set[str]:
        """The site's inputs besides carry and sublayer."""
        names = {source for source, _, _ in self.terms} - {"carry", "sublayer"}
        coefficients = tuple(coefficient for _, _, coefficient in self.terms)
        return names | inputs_of((*coefficients, *self.computed))


class LearnedScalar(Module):
    """A learned scalar."""

    def __init__(self, start: float, lr_mul: float, wd_mul: float) -> None:
        super().__init__()
        self.scalar = Param((1,), init=Constant(start), role="scalar", lr_mul=lr_mul, wd_mul=wd_mul)

    def forward(self) -> Any:
        """Return the scalar, (1,)."""
        return self.scalar


class Site(Module):
    """A residual site: carry (B, T, C), sublayer (B, T, C) or None -> (B, T, C)."""

    def __init__(self, geometry: ModelShape, spec: SiteSpec) -> None:
        super().__init__()
        sources = [source for source, _, _ in spec.terms]
        self.claimed = tuple(one for one in ("carry", "sublayer") if one in sources)
        added: list[tuple[str, str, str]] = []  # source, the key of its coefficient, its plugin
        settings: dict[str, Setting] = {}
        coefficients: dict[str, Module] = {}
        for source, owner, coefficient in spec.terms:
            # a tap's name has dots, which a child module's may not have
            key = source.replace(".", "_")
            if sources.count(source) > 1:
                key = f"{key}_{owner}"
            if source not in self.claimed:
                added.append((source, key, owner))
            if isinstance(coefficient, Setting):
                settings[key] = coefficient
            elif isinstance(coefficient, Node):
                coefficients[key] = coefficient.make(geometry)
            else:
                scalar = LearnedScalar(coefficient.start, coefficient.lr_mul, coefficient.wd_mul)
                scalar.bound, scalar.owner = (), owner
                coefficients[key] = scalar
        self.added, self.settings, self.coefficients = tuple(added), settings, coefficients
        zeros = {key for key, setting in settings.items() if setting.constant == 0}
        self.dropped = zeros.intersection(self.claimed) if added else set()
        self.computed = {node.name: node.make(geometry) for node in spec.computed}

    def forward(self, carry: Any, sublayer: Any, scope: Scope) -> Any:
        """Sum the sources; carry and sublayer have coefficient 1 unless claimed."""
        own = {"carry": carry, "sublayer": sublayer, "x": carry}
        for name, node in self.computed.items():
            scope.reads[name] = scope.apply(node, own)
        parts = []
        for key, value in (("carry", carry), ("sublayer", sublayer)):
            if value is not None and key not in self.dropped:
                parts.append(self.scaled(key, value, own, scope) if key in self.claimed else value)
        for source, key, owner in self.added:
            value, wanted = scope.reads[source], dtype_name(carry)
            if wanted not in (got := dtype_name(value), "float64") or not _fits(value, carry):
                there = f"{got} {tuple(value.shape)} to x of {wanted} {tuple(carry.shape)}"
                did, fix = f"adds '{source}' of {there} in", "give it the shape and dtype of x"
                raise PluginCodeError(owner, "model.residual", did=did, where=self.path, fix=fix)
            parts.append(self.scaled(key, value, own, scope))
        x, *rest = parts
        for part in rest:
            x = x + part
        return x

    def scaled(self, key: str, value: Any, own: dict[str, Any], scope: Scope) -> Any:
        """Multiply a value by its coefficient, in the value's dtype."""
        if key in self.settings:
            return value * self.ops.like(self.settings[key].of(scope.reads), value)
        coefficient = self.coefficients[key]
        factor = check_dtype(coefficient, scope.apply(coefficient, own), value)
        if not _fits(factor, value):
            whole, did = tuple(value.shape), f"returned the coefficient {tuple(factor.shape)} from"
            fix = f"return {whole}, or 1 in place of any of its sizes: {(*whole[:-1], 1)}"
            raise unusable(coefficient, did, fix)
        return value * factor


def _fits(array: Any, like: Any) -> bool:
    """Return whether an array can be broadcast to the shape of ``like``."""
    shape, whole = tuple(array.shape), tuple(like.shape)
    if shape in (whole, (1,)):  # the usual case: Dynamo traces the rest slowly
        return True
    sizes = zip(shape[::-1], whole[::-1], strict=False)
    return len(shape) <= len(whole) and all(n in (1, size) for n, size in sizes)
