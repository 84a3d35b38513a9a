"""The slots of the model outside attention."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from minillm_core.errors import PlanError
from minillm_core.nn.block import Nothing
from minillm_core.nn.geometry import Geometry
from minillm_core.nn.init import Init, Referenced
from minillm_core.nn.node import Node
from minillm_core.nn.residual import Learned, SiteSpec
from minillm_core.nn.value import Setting
from minillm_core.plugins.builders.base import Anchor, Builder, Sealed, ValueTable
from minillm_core.plugins.slots import Chain, Claim, Terms

__all__ = ["ModelBuilder", "ModelSlots"]


class ModelSlots:
    """What plugins said about the model, and its resolution.

    Args:
        geometry: the model's.
        layered: the plugins that can be told their layers.
    """

    def __init__(self, geometry: Geometry, layered: Collection[str] = ()) -> None:
        self.geometry = geometry
        layers = range(geometry.layers)
        self.embed = Chain("model.embed", ("mix", "norm"))
        self.streams: Terms[Node] = Terms("model.streams")
        sites = [f"layers.{i}.{place}" for i in layers for place in ("in", "mid", "out")]
        self.residual: dict[str, Terms[Setting | Learned | Node]] = {
            **{site: Terms(f"model.residual[{site}]", layered) for site in sites},
            "final": Terms("model.residual[final]"),
        }
        self.taps: set[str] = set()  # sites that are read further on
        self.tap_names: Terms[str] = Terms("model.taps")  # name for forward() -> site
        self.attention: list[Claim[Node | Nothing]] = [
            Claim(f"model.attention[{i}]", layered) for i in layers
        ]
        self.mlp: list[Claim[Node | Nothing]] = [Claim(f"model.mlp[{i}]", layered) for i in layers]
        norms = [f"layers.{i}.{part}" for i in layers for part in ("attention", "mlp")]
        self.norm: dict[str, Claim[Node | Nothing]] = {
            **{site: Claim(f"model.norm[{site}]", layered) for site in norms},
            "final": Claim("model.norm[final]"),
        }
        self.linear: dict[str, Claim[Node]] = {}
        self.init: dict[str, Claim[Init]] = {}
        self.init_roles: list[tuple[str, str, Init]] = []  # owner, role, initialiser

    def inits(self, roles: Mapping[str, str]) -> dict[str, tuple[str, Init]]:
        """Parameter -> (owner, initialiser), where claimed by name or by role.

        Args:
            roles: of every parameter of the model.

        Raises:
            PlanError: two claimants, or a role that no parameter has.
        """
        for owner, role, init in self.init_roles:
            chosen = [name for name, its in roles.items() if its == role]
            if not chosen:
                raise PlanError(
                    f"plugin '{owner}' gives initial values to parameters of the role '{role}', "
                    "and the model has none",
                    where=f"model.init_role[{role}]",
                    fix="roles are " + ", ".join(sorted(set(roles.values()))),
                )
            for name in chosen:
                self.init.setdefault(name, Claim(f"model.init[{name}]")).add(owner, init)
        return {name: (claim.owner, claim.resolve()) for name, claim in sorted(self.init.items())}

    def site(self, name: str) -> SiteSpec | None:
        """One residual site; None: nobody claimed anything there."""
        entries = tuple((key, owner, value) for key, owner, value in self.residual[name].resolve())
        return SiteSpec(name, entries) if entries else None

    def ordered_streams(self) -> tuple[Node, ...]:
        """Streams in an order in which each finds what it reads.

        Raises:
            PlanError: they read each other in a circle.
        """
        waiting = {name: node for name, _, node in self.streams.resolve()}
        order: list[Node] = []
        while waiting:
            ready = [n for n, node in waiting.items() if not set(node.external) & set(waiting)]
            if not ready:
                raise PlanError(
                    f"streams {', '.join(sorted(waiting))} read each other in a circle",
                    where="model.streams",
                    fix="take one of the reads away",
                )
            order.append(waiting.pop(min(ready)))
        return tuple(order)


class Embed(Sealed):
    """Chain: x (B, T, C) -> x.

    *the lookup* < mix < norm. What comes out is ``x0`` from there on.

    ::

        model.embed.norm(UnitNorm)
    """

    def __init__(self, builder: Builder, chain: Chain) -> None:
        self.mix = Anchor(builder, chain, "mix", ("x",))
        self.norm = Anchor(builder, chain, "norm", ("x",))


class ModelBuilder(Builder):
    """The model outside attention, as one plugin sees it.

    Attributes:
        layers: how many.
        dim: C.
        heads: H.
        kv_heads: K.
        head_dim: D.
        hidden: width inside the MLP.
        vocab: V.
    """

    def __init__(self, owner: str, values: ValueTable, slots: ModelSlots) -> None:
        super().__init__(owner, values)
        self._slots = slots
        g = slots.geometry
        self.layers, self.dim, self.hidden, self.vocab = g.layers, g.dim, g.hidden, g.vocab
        self.heads, self.kv_heads, self.head_dim = g.heads, g.kv_heads, g.head_dim
        self.embed = Embed(self, slots.embed)

    def stream(self, name: str, cls: type, **arguments: Any) -> None:
        """Term: what its forward reads -> an array, computed once a micro-batch, known as ``name``.

        A stream may read other streams, x0 and the batch; blocks and sites read it by its name.

        ::

            model.stream("bigram_table", BigramEmbedding, buckets=65536)

        Raises:
            PlanError: the name is one that slots or the batch give, or no identifier.
        """
        self._named("model.streams", name)
        node = self._node(f"model.streams[{name}]", (), cls, arguments)
        self._slots.streams.add(self._owner, name, replace(node, name=name))

    def tap(self, site: str, *, name: str | None = None) -> str:
        """Read the residual stream after ``site`` (layers.i.in, .mid, .out) further on.

        ::

            model.tap("layers.0.out", name="early")

        Args:
            site: where it is read.
            name: what a node's ``forward`` calls it; without one, residual sites alone can name it.

        Returns:
            What it is called: ``name``, or the site.

        Raises:
            PlanError: no such site, or a name that slots or the batch give, or no identifier.
        """
        self._site(site)
        if site == "final":
            raise PlanError(f"plugin '{self._owner}': nothing comes after the site 'final'")
        self._slots.taps.add(site)
        if name is None:
            return site
        self._named("model.taps", name)
        self._slots.tap_names.add(self._owner, name, site)
        return name

    def residual(self, site: str, source: str, coefficient: Any = 1.0, **arguments: Any) -> None:
        """Claim per (site, source): x, carry, sublayer (B, T, C) -> a coefficient.

        What goes on after a site is the sum over its sources of coefficient x source.

        Args:
            site: layers.i.in, .mid (attention joins), .out (the MLP joins), or final.
            source: carry, sublayer (both there with 1 unless claimed), x0, a stream, a tap.
            coefficient: a number, a schedule, a Learned, or a Module class.
            arguments: of the Module's constructor, JSON.

        ::

            model.residual("layers.3.in", "x0", Learned(0.0, lr_mul=5.0))
        """
        entries = self._site(site)
        where = f"{entries.where}[{source}]"
        if isinstance(coefficient, Learned):
            value: Setting | Learned | Node = coefficient
        elif isinstance(coefficient, type):
            own = ("x", "carry", "sublayer")
            value = self._node(where, own, coefficient, arguments)
        else:
            value = self._setting(f"residual.{source}", coefficient, site)
        entries.add(self._owner, source, value)

    def attention(self, layer: int, cls: type | None, **arguments: Any) -> None:
        """Claim: x (B, T, C) -> (B, T, C), a whole attention; None: none in this layer.

        ::

            model.attention(-1, None)
        """
        self._place(self._slots.attention[self._layer(layer)], cls, arguments)

    def mlp(self, layer: int, cls: type | None, **arguments: Any) -> None:
        """Claim: x (B, T, C) -> (B, T, C), a whole MLP; None: none in this layer.

        ::

            model.mlp(0, ReluSquared)
        """
        self._place(self._slots.mlp[self._layer(layer)], cls, arguments)

    def norm(self, site: str, cls: type | None, **arguments: Any) -> None:
        """Claim: x (B, T, C) -> (B, T, C), the norm at layers.i.attention, .mlp or final; None: none.

        ::

            model.norm("final", UnitNorm)
        """
        if site not in self._slots.norm:
            raise PlanError(f"plugin '{self._owner}': there is no norm at '{site}'")
        self._place(self._slots.norm[site], cls, arguments)

    def linear(self, leaf: str, cls: type, **arguments: Any) -> None:
        """Claim: x (..., C), weight (O, C) -> (..., O), the product of a leaf of that name.

        ::

            model.linear("layers.0.attention.q", LowRank, rank=8)
        """
        node = self._node(f"model.linear[{leaf}]", ("x", "weight"), cls, arguments)
        if node.reads != ("x", "weight"):
            raise PlanError(
                f"plugin '{self._owner}', slot {node.slot}: {cls.__name__}.forward takes "
                f"({', '.join(node.reads)}), and is called with (x, weight)"
            )
        claim = self._slots.linear.setdefault(leaf, Claim(f"model.linear[{leaf}]"))
        claim.add(self._owner, node)

    def init(self, parameter: str, init: Any, **arguments: Any) -> None:
        """Claim: (rng, shape) -> float32, a parameter's initial values; or an initialiser.

        ::

            model.init("head.weight", zeros)
        """
        claim = self._slots.init.setdefault(parameter, Claim(f"model.init[{parameter}]"))
        claim.add(self._owner, self._init(claim.where, init, arguments))

    def init_role(self, role: str, init: Any, **arguments: Any) -> None:
        """Claim: the same for every parameter with a role (attention.o), whoever declares it."""
        value = self._init(f"model.init_role[{role}]", init, arguments)
        self._slots.init_roles.append((self._owner, role, value))

    def _init(self, where: str, init: Any, arguments: dict[str, Any]) -> Init:
        if isinstance(init, Init):
            return init
        _, reference, given = self._function(where, init, arguments)
        return Referenced(reference, given)

    def _place(self, claim: Claim[Any], cls: type | None, arguments: dict[str, Any]) -> None:
        if cls is None:
            claim.add(self._owner, Nothing(self._owner))
        else:
            claim.add(self._owner, self._node(claim.where, ("x",), cls, arguments))

    def _layer(self, layer: int) -> int:
        if not -self.layers <= layer < self.layers:
            raise PlanError(
                f"plugin '{self._owner}' names layer {layer} of a model with {self.layers} layers",
                fix=f"name layers from 0 to {self.layers - 1} (or -{self.layers} to -1)",
            )
        return layer % self.layers

    def _site(self, site: str) -> Terms[Any]:
        if site not in self._slots.residual:
            raise PlanError(
                f"plugin '{self._owner}': there is no residual site '{site}'",
                fix=f"sites are layers.i.in, .mid, .out (i < {self.layers}) and final",
            )
        return self._slots.residual[site]
