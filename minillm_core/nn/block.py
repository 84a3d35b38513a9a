"""One block: attention and MLP, each added to the residual stream at a site.

Blocks are pure: ``f(x, *reads) -> (x, *taps, *terms, *statistics)``, one flat tuple, sorted within
each kind. Nothing is written to a context inside a block, nothing is captured: a checkpoint would
drop the gradients of what it does not see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minillm_core.nn.attention import Attention, AttentionSpec
from minillm_core.nn.geometry import Geometry
from minillm_core.nn.mlp import SwiGLU
from minillm_core.nn.module import Module
from minillm_core.nn.node import Node, Scope
from minillm_core.nn.norm import RMSNorm
from minillm_core.nn.residual import Site, SiteSpec

__all__ = ["Block", "BlockSpec", "Nothing"]


@dataclass(frozen=True)
class Nothing:
    """A claim that leaves a place empty: no attention, no MLP, no norm."""

    owner: str


@dataclass(frozen=True)
class BlockSpec:
    """One block, resolved."""

    attention: AttentionSpec | Node | Nothing
    mlp: Node | Nothing | None = None  # None: the plain SwiGLU
    attention_norm: Node | Nothing | None = None  # None: RMSNorm
    mlp_norm: Node | Nothing | None = None
    site_in: SiteSpec | None = None  # None: carry alone
    site_mid: SiteSpec | None = None  # None: carry + sublayer
    site_out: SiteSpec | None = None
    taps: tuple[str, ...] = ()  # of this block's "in", "mid", "out", sorted

    def sites(self) -> tuple[SiteSpec, ...]:
        """The claimed ones."""
        return tuple(s for s in (self.site_in, self.site_mid, self.site_out) if s is not None)

    def nodes(self) -> tuple[Node, ...]:
        """Every node in the block."""
        places = (self.attention, self.mlp, self.attention_norm, self.mlp_norm)
        found = [place for place in places if isinstance(place, Node)]
        if isinstance(self.attention, AttentionSpec):
            found.extend(self.attention.nodes())
        for site in self.sites():
            found.extend(c for _, _, c in site.terms if isinstance(c, Node))
        return tuple(found)

    def reads(self) -> tuple[str, ...]:
        """What the block is given besides x, sorted: exactly what its nodes declare."""
        names = {name for node in self.nodes() for name in node.external}
        for site in self.sites():
            names |= site.reads()
        if isinstance(self.attention, AttentionSpec):
            names |= self.attention.values()
            if self.attention.documents is not None:
                names.add("documents")
        return tuple(sorted(names))


def norm_of(geometry: Geometry, claim: Node | Nothing | None) -> Module | None:
    """The norm at a site: RMSNorm, a plugin's, or none."""
    if isinstance(claim, Nothing):
        return None
    return RMSNorm(geometry) if claim is None else claim.make(geometry)


def normed(norm: Any, x: Any, scope: Scope) -> Any:
    """x (B, T, C) through a norm: the core's, a plugin's, or none."""
    if norm is None:
        return x
    return scope.apply(norm, {"x": x}) if hasattr(norm, "owner") else norm(x)


def joined(site: Site | None, x: Any, y: Any, scope: Scope) -> Any:
    """x (B, T, C) after a site; y (B, T, C) is its sublayer's, None where there is none."""
    if site is not None:
        return site(x, y, scope)
    return x if y is None else x + y


class Block(Module):
    """x (B, T, C) and reads -> (x, *taps, *terms, *statistics)."""

    def __init__(self, geometry: Geometry, spec: BlockSpec) -> None:
        super().__init__()
        self.inputs = spec.reads()
        self.taps = spec.taps
        self.attention_norm = self.mlp_norm = None
        self.attention = self.mlp = None
        if not isinstance(spec.attention, Nothing):
            self.attention_norm = norm_of(geometry, spec.attention_norm)
            if isinstance(spec.attention, AttentionSpec):
                self.attention = Attention(geometry, spec.attention)
            else:
                self.attention = spec.attention.make(geometry)
        self.plain_attention = isinstance(spec.attention, AttentionSpec)
        if not isinstance(spec.mlp, Nothing):
            self.mlp_norm = norm_of(geometry, spec.mlp_norm)
            if spec.mlp is None:
                self.mlp = SwiGLU(geometry)
            else:
                self.mlp = spec.mlp.make(geometry)
        self.plain_mlp = spec.mlp is None
        self.site_in = Site(geometry, spec.site_in) if spec.site_in else None
        self.site_mid = Site(geometry, spec.site_mid) if spec.site_mid else None
        self.site_out = Site(geometry, spec.site_out) if spec.site_out else None

    def forward(self, x: Any, *reads: Any) -> tuple[Any, ...]:
        """See the module's docstring; ``reads`` are in the order of ``self.inputs``."""
        return self.within(x, Scope(dict(zip(self.inputs, reads, strict=True))))

    def within(self, x: Any, scope: Scope) -> tuple[Any, ...]:
        """The same, with what is read already in a scope."""
        at: dict[str, Any] = {}
        at["in"] = x = joined(self.site_in, x, None, scope)
        y = None
        if self.attention is not None:
            h = normed(self.attention_norm, x, scope)
            if self.plain_attention:
                y = self.attention(h, scope)
            else:
                y = scope.apply(self.attention, {"x": h})
        at["mid"] = x = joined(self.site_mid, x, y, scope)
        y = None
        if self.mlp is not None:
            h = normed(self.mlp_norm, x, scope)
            y = self.mlp(h) if self.plain_mlp else scope.apply(self.mlp, {"x": h})
        at["out"] = x = joined(self.site_out, x, y, scope)
        emitted = [scope.emitted[name] for name in (*self.term_names, *self.statistic_names)]
        return (x, *[at[tap] for tap in self.taps], *emitted)
