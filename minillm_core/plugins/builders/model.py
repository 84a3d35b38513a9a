"""The slots of the model outside attention."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from minillm_core.errors import PlanError
from minillm_core.nn.attention import Seen
from minillm_core.nn.block import INPUTS, Omitted
from minillm_core.nn.decoder import Loop
from minillm_core.nn.init import Init, Referenced
from minillm_core.nn.node import ModelShape, Node, Setting
from minillm_core.nn.residual import Learned, SiteSpec
from minillm_core.optim.schedules import Schedule, Stages
from minillm_core.plugins.builders.base import Anchor, Builder, Sealed, ValueTable
from minillm_core.plugins.slots import (
    EMBED,
    STREAMS,
    Chain,
    Claim,
    Claims,
    Terms,
    filled_at,
    in_order,
    time_of,
)

SITES: Mapping[str, tuple[str, ...]] = {
    "in": ("carry",),
    "mid": ("carry", "sublayer"),
    "out": ("carry", "sublayer"),
}
"""Residual site of a layer -> the sources that are there with 1 unless they are claimed."""


Sum = Terms[Setting | Learned | Node]


class InitSlots:
    """Claims on the initial values of parameters, by name and by role, and their resolution."""

    def __init__(self) -> None:
        self.claims: Claims[str, Init] = Claims("model.init[{}]", "init:{}", shapes=False)
        self.roles: list[tuple[str, str, Init, str]] = []  # owner, role, initialiser, line

    def resolve(self, roles: Mapping[str, str]) -> dict[str, tuple[str, Init]]:
        """Map parameter -> (owner, initialiser), where claimed by name or by role.

        Args:
            roles: of every parameter of the model.

        Raises:
            PlanError: two claimants, or a role that no parameter has.
        """
        for owner, role, init, line in self.roles:
            chosen = [name for name, its in roles.items() if its == role]
            if not chosen:
                raise PlanError(
                    f"plugin '{owner}' gives initial values to parameters of the role '{role}', "
                    "and the model has none",
                    where=f"model.init_role[{role}]",
                    fix="roles are " + ", ".join(sorted(set(roles.values()))),
                ).concerning(plugins=(owner,))
            for name in chosen:
                self.claims[name].add(owner, init, line)
        return {name: (one.owner, one.resolve()) for name, one in sorted(self.claims.items())}


class ModelSlots:
    """The slots of the model outside attention, each declared once, and their resolution.

    Args:
        geometry: the model's.
        rope_base: of rotations.
        layered: the plugins with an option ``layers``.
    """

    def __init__(
        self, geometry: ModelShape, rope_base: float, layered: Collection[str] = ()
    ) -> None:
        self.geometry, self.rope_base = geometry, rope_base
        g = geometry
        kv = "" if g.kv_heads == g.heads else f" ({g.kv_heads} key-value)"
        parts = {
            "attention": f"attention {g.heads} x {g.head_dim}{kv}",
            "mlp": f"SwiGLU {g.hidden}",
        }
        sublayers = [(part, i) for i in range(g.layers) for part in parts]

        def claim(part: str, i: int) -> Claim[Any]:
            where, place = f"model.{part}[{i}]", f"layers.{i}.{part}"
            here: dict[str, Any] = {"layered": layered, "order": time_of(place)}
            return Claim(where, default=parts[part], also=(place,), **here)

        def norm(site: str, **more: Any) -> Claim[Any]:
            return Claim(f"model.norm[{site}]", default="RMSNorm", also=(site,), **more)

        def summed(slot: str, site: str, sources: tuple[str, ...], *also: str) -> Sum:
            at = {} if site == "final" else {"layered": layered, "order": time_of(site)}
            always, why = dict.fromkeys(sources, "1"), "claims it"
            where = f"model.{slot}[{site}]"
            return Terms(where, also=also, always=always, shared=True, kind="claim", why=why, **at)

        self.embed = Chain("model.embed", ("mix", "norm"), order=EMBED)
        self.streams: Terms[Node] = Terms("model.streams", order=STREAMS)
        self.tap_names: Terms[str] = Terms("model.taps", listed=False)  # name -> site
        self.sublayer: dict[tuple[str, int], Claim[Node | Omitted]] = {
            (part, i): claim(part, i) for part, i in sublayers
        }
        self.norm: dict[str, Claim[Node | Omitted]] = {
            place: norm(place, layered=layered, order=time_of(place))
            for place in (f"layers.{i}.{part}" for part, i in sublayers)
        } | {"final": norm("final")}
        self.residual: dict[str, Sum] = {
            site: summed("residual", site, sources, site)
            for site, sources in (
                *((f"layers.{i}.{at}", its) for i in range(g.layers) for at, its in SITES.items()),
                ("final", ("carry",)),
            )
        }
        parts_given = (f"layers.{i}.{part}" for i in range(g.layers) for part in INPUTS)
        self.inputs: dict[str, Sum] = {p: summed("input", p, ("carry",)) for p in parts_given}
        self.computed: dict[str, str] = {}  # stream -> the residual site where it is computed
        self.linear: dict[str, Claim[Node]] = {}  # leaf -> its product
        self.loop: Claim[Loop] = Claim("model.loop", default="each block once")
        self.taps: set[str] = set()  # sites that are read further on
        self.init = InitSlots()

    def site(self, name: str) -> SiteSpec | None:
        """Resolve a residual site, or an input; None: no plugin claims anything there."""
        held = self.residual[name] if name in self.residual else self.inputs[name]
        entries = tuple((key, owner, value) for key, owner, value in held.resolve())
        computed = self.ordered_streams(name)
        return SiteSpec(name, entries, computed) if entries or computed else None

    def ordered_streams(self, site: str | None = None) -> tuple[Node, ...]:
        """Order the streams so that each finds the streams that it reads.

        Args:
            site: where they are computed; None: before the blocks.

        Raises:
            PlanError: they read each other in a circle.
        """
        streams = self.streams.resolve()
        nodes = {name: node for name, _, node in streams if self.computed.get(name) == site}
        order, circle = in_order({name: node.external for name, node in nodes.items()})
        if circle:
            raise PlanError(
                f"streams {', '.join(circle)} read each other in a circle",
                where="model.streams",
                fix="take one of the reads away",
            ).concerning(plugins=(self.streams.held[name][0] for name in circle))
        return tuple(nodes[name] for name in order)


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
        rope_base: of rotations, as configured.
    """

    _slots: ModelSlots

    def __init__(self, owner: str, values: ValueTable, slots: ModelSlots) -> None:
        super().__init__(owner, values, slots)
        g = slots.geometry
        self.layers, self.dim, self.hidden, self.vocab = g.layers, g.dim, g.hidden, g.vocab
        self.heads, self.kv_heads, self.head_dim = g.heads, g.kv_heads, g.head_dim
        self.rope_base = slots.rope_base
        self.embed = Embed(self, slots.embed)

    def stream(
        self,
        name: str,
        cls: type,
        *,
        at: str | None = None,
        reads: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        """Term: what its forward reads -> an array, computed once a micro-batch, known as ``name``.

        A stream may read other streams, x0 and the batch; blocks and sites read it by its name.
        With ``at`` it is computed there, from the stream x (B, T, C) as it comes to that place:
        coefficients that depend on the data, of many sources at once; or further lanes beside the
        stream, which streams at .mid and .out make anew of the earlier ones and of sublayer, what
        joins there. It is read at the same place and behind it, by its name.

        ::

            model.stream("bigram_table", BigramEmbedding, buckets=65536)
            model.stream("mix_3", Coefficients, at="layers.3.in")

        Args:
            name: of the array.
            cls: a Module.
            at: a residual site, layers.i.attention or layers.i.mlp; None: before the blocks.
            reads: argument of ``forward`` -> the name at hand, where it is another for this stream.
            arguments: of the Module's constructor, JSON.

        Raises:
            PlanError: the name is one that slots or the batch give, or no identifier; no such site.
        """
        self._named("model.streams", name)
        own, streams = (), self._slots.streams
        if at is not None:
            part = re.fullmatch(r"layers\.\d+\.(attention|mlp)", at) and self._slots.inputs.get(at)
            entries = part or self._site(at)
            own = (*entries.always, "x")
            self._slots.computed[name], streams.times[name] = at, entries.order
        node = self._node(f"model.streams[{name}]", own, cls, arguments, reads=reads)
        streams.add(self._owner, name, replace(node, name=name))

    def tap(self, site: str, *, name: str | None = None) -> str:
        """Read the residual stream after ``site`` (layers.i.in, .mid, .out) further on, or layers.i.attention.v.

        Later layers may read arrays of an attention too: ``layers.i.attention.q``, ``.k``, ``.v``
        and ``.y``, as the chain ``attn.out`` is given them: q (B, T, H, D) and k (B, T, K, D)
        rotated, unless a layout has them rotated later; v (B, T, K, D) with its terms; y
        (B, T, H, D) behind that chain. In decoding all taps are of the new columns.

        ::

            model.tap("layers.0.attention.v", name="first_value")

        Args:
            site: where it is read.
            name: what a node's ``forward`` calls it; without one, residual sites alone can name it,
                and arrays of an attention have no use.

        Returns:
            What it is called: ``name``, or the site.

        Raises:
            PlanError: no such site, or a name that slots or the batch give, or no identifier.
        """
        inner = re.fullmatch(r"layers\.(\d+)\.attention\.[qkvy]", site)
        if not inner or int(inner[1]) >= self.layers:
            self._site(site)
        elif name is None:
            raise PlanError(
                f"plugin '{self._owner}' taps '{site}' without a name",
                fix=f'model.tap("{site}", name="..."): nodes of later layers read it by that',
            )
        if site == "final":
            raise PlanError(f"plugin '{self._owner}': nothing comes after the site 'final'")
        self._slots.taps.add(site)
        if name is None:
            return site
        self._named("model.taps", name)
        self._slots.tap_names.add(self._owner, name, site)
        return name

    def residual(
        self,
        site: str,
        source: str,
        coefficient: Any = 1.0,
        *,
        reads: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        """Term per (site, source): x, carry, sublayer (B, T, C) -> a coefficient.

        What goes on after a site is the sum over its sources of coefficient x source. The coefficients
        of carry and sublayer are claims; to any other source several plugins may add.

        Args:
            site: layers.i.in, .mid (attention joins), .out (the MLP joins), or final.
            source: carry, sublayer (both there with 1 unless claimed), x0, a stream, a tap.
            coefficient: a number, a schedule, a Learned, or a Module class.
            reads: argument of ``forward`` -> the name at hand, where it is another at this site.
            arguments: of the Module's constructor, JSON.

        ::

            model.residual("layers.3.in", "x0", Learned(0.0, lr_mul=5.0))
        """
        self._add(self._site(site), site, source, coefficient, reads, arguments)

    def input(
        self,
        part: str,
        source: str,
        coefficient: Any = 1.0,
        *,
        reads: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        """Term per (part, source): x, carry (B, T, C) -> a coefficient.

        What a part is given, before its norm, in the place of the stream, which stays as it is: the
        sum over its sources of coefficient x source. The coefficient of carry, which is the stream
        there, is a claim; for q, k and v the carry is what their attention is given. They have its
        norm, each apart.

        ::

            model.input("layers.3.attention.v", "x0", Learned(0.0))

        Args:
            part: layers.i.attention, .attention.q, .attention.k, .attention.v or .mlp.
            source: carry (there with 1 unless claimed), x0, a stream, a tap of an earlier layer.
            coefficient: a number, a schedule, a Learned, or a Module class.
            reads: argument of ``forward`` -> the name at hand, where it is another at this part.
            arguments: of the Module's constructor, JSON.

        Raises:
            PlanError: no such part; while resolving, where another plugin leaves it out.
        """
        if part not in self._slots.inputs:
            raise PlanError(
                f"plugin '{self._owner}': there is no part '{part}' with an input",
                fix=f"parts are layers.i.attention, .attention.q, .attention.k, .attention.v and "
                f".mlp (i < {self.layers})",
            )
        self._add(self._slots.inputs[part], part, source, coefficient, reads, arguments)

    def _add(
        self, entries: Sum, site: str, source: str, coefficient: Any, reads: Any, arguments: Any
    ) -> None:
        """Add a source to a sum."""
        where, slot = f"{entries.where}[{source}]", entries.where.partition("[")[0]
        if isinstance(coefficient, Learned):
            value: Setting | Learned | Node = coefficient
        elif isinstance(coefficient, type):
            own = ("x", "carry", "sublayer")
            value = self._node(where, own, coefficient, arguments, reads=reads)
        else:
            value = self._setting(f"{slot.removeprefix('model.')}.{source}", coefficient, site)
        entries.add(self._owner, source, value)

    def attention(self, layer: int, cls: type | None, **arguments: Any) -> None:
        """Claim: x (B, T, C), window, documents -> (B, T, C), a whole attention; None: none in this layer.

        One whose ``forward`` names ``window`` or ``documents`` leaves those slots of its layer open, and is
        given what plugins claim there: how many keys a query sees, itself included, and int32 (B, S) of all
        columns, of which the queries are the last T; None where no plugin does. Its other slots are gone.

        ::

            model.attention(-1, None)
        """
        claim, own = self._slots.sublayer["attention", self._layer(layer)], ("x", *vars(Seen()))
        self._place(claim, cls, arguments, own)

    def mlp(self, layer: int, cls: type | None, **arguments: Any) -> None:
        """Claim: x (B, T, C) -> (B, T, C), a whole MLP; None: none in this layer.

        ::

            model.mlp(0, ReluSquared)
        """
        self._place(self._slots.sublayer["mlp", self._layer(layer)], cls, arguments)

    def norm(self, site: str, cls: type | None, **arguments: Any) -> None:
        """Claim: x (B, T, C) -> (B, T, C), the norm at layers.i.attention, .mlp or final; None: none.

        ::

            model.norm("final", UnitNorm)
        """
        if site not in self._slots.norm:
            raise PlanError(f"plugin '{self._owner}': there is no norm at '{site}'")
        self._place(self._slots.norm[site], cls, arguments)

    def linear(
        self, leaf: str, cls: type, *, reads: Mapping[str, str] | None = None, **arguments: Any
    ) -> None:
        """Claim: x (..., C), weight (O, C) -> (..., O), the product of a leaf of that name.

        Its forward takes x and weight first. In the plain attention (q, k, v, o) and SwiGLU (gate,
        up, down) it may name more behind them: fields, streams, taps, schedule values.

        ::

            model.linear("layers.0.attention.q", LowRank, rank=8)

        A class whose product is linear in x may have ``folded(weight, own)``, of NumPy arrays: the
        weight (O, C) whose plain product is the same, ``own`` being its parameters by their names
        there. A model directory is then written without it; such a product reads nothing more.

        Args:
            leaf: its path.
            cls: a Module.
            reads: argument of ``forward`` -> the name at hand, where it is another at this leaf.
            arguments: of the Module's constructor, JSON.
        """
        node = self._node(f"model.linear[{leaf}]", ("x", "weight"), cls, arguments, reads=reads)
        folds = hasattr(cls, "folded")
        if node.reads[:2] != ("x", "weight") or (folds and node.external):
            raise self._refusal(
                node.slot,
                f"{cls.__name__}.forward takes ({', '.join(node.reads)}), and is called with "
                f"(x, weight) {'alone, which are folded' if folds else 'first'}",
            )
        order = time_of(leaf)
        claim: Claim[Node] = Claim(node.slot, default="x W^T", also=(leaf,), order=order)
        self._slots.linear.setdefault(leaf, claim).add(self._owner, node)

    def loop(self, first: int, last: int, times: int | Schedule) -> None:
        """Claim: blocks ``first`` to ``last`` run ``times`` times, one round after the other.

        ::

            model.loop(2, 5, stages((0, 1), (0.75, 2)))

        A round begins with what the one before it gave, and reads streams, taps and x0 as the first one
        does; what is tapped within is that of the last round. Parameters are those of one round, and get
        the gradients of all. In decoding each round has a KV cache of its own. A model is evaluated and
        written from with as many rounds as the run ends with.

        Args:
            first: of the blocks.
            last: of them, itself one.
            times: in all, whole; ``stages`` give each number a step of its own.

        Raises:
            PlanError: no such blocks, or no such number; while resolving, where a node of one of them
                emits terms or statistics, which there is one of.
        """
        first, last = self._layer(first), self._layer(last)
        staged = isinstance(times, Stages) and min(times.all()) >= 1
        if first > last or not (staged or (isinstance(times, int) and times >= 1)):
            what = f"layers {first} to {last}, {times!r} times"
            fix = "layers that rise; 2, or stages((0, 1), (0.75, 2))"
            raise self._refusal("model.loop", what, fix=fix)
        setting = self._setting("loop", times)
        self._slots.loop.add(self._owner, Loop(self._owner, first, last, setting))

    def init(self, parameter: str, init: Any, **arguments: Any) -> None:
        """Claim: (rng, shape) -> float32, a parameter's initial values; or an initialiser.

        ::

            model.init("head.weight", zeros)
        """
        value = self._init(f"model.init[{parameter}]", init, arguments)
        self._slots.init.claims[parameter].add(self._owner, value)

    def init_role(self, role: str, init: Any, **arguments: Any) -> None:
        """Claim: the same for every parameter with a role (attention.o), whichever plugin declares it."""
        value = self._init(f"model.init_role[{role}]", init, arguments)
        self._slots.init.roles.append((self._owner, role, value, filled_at()))

    def _init(self, where: str, init: Any, arguments: dict[str, Any]) -> Init:
        if isinstance(init, Init):
            return init
        function = self._function(where, init, arguments)
        return Referenced(function.reference, function.arguments)

    def _place(
        self, claim: Claim[Any], cls: type | None, arguments: dict[str, Any], own: Any = ("x",)
    ) -> None:
        if cls is None:
            claim.add(self._owner, Omitted(self._owner))
        else:
            claim.add(self._owner, self._node(claim.where, own, cls, arguments))

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
                fix=f"sites are layers.i.in, .mid, .out (i < {self.layers}) and final; taps are "
                "also of layers.i.attention.q, .k, .v and .y",
            )
        return self._slots.residual[site]
