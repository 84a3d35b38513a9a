"""The slots of the model outside attention."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from minillm_core.errors import PlanError
from minillm_core.nn.attention import Masks
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
    call_site,
    time_of,
    topological,
)

SITES: Mapping[str, tuple[str, ...]] = {
    "in": ("carry",),
    "mid": ("carry", "sublayer"),
    "out": ("carry", "sublayer"),
}
"""Residual site of a layer -> its default sources, each with coefficient 1 unless claimed."""


Sum = Terms[Setting | Learned | Node]


class InitSlots:
    """Claims on the initial values of parameters, by name and by role, and their resolution."""

    def __init__(self) -> None:
        self.claims: Claims[str, Init] = Claims("model.init[{}]", "init:{}", shapes=False)
        self.roles: list[tuple[str, str, Init, str]] = []  # owner, role, initialiser, line

    def resolve(self, roles: Mapping[str, str]) -> dict[str, tuple[str, Init]]:
        """Return parameter -> (owner, initialiser) for each parameter claimed by name or by role.

        Args:
            roles: parameter -> role, of every parameter of the model.

        Raises:
            PlanError: two claimants, or a role that no parameter has.
        """
        for owner, role, init, line in self.roles:
            chosen = [name for name, its in roles.items() if its == role]
            if not chosen:
                raise PlanError(
                    f"plugin '{owner}' gives initial values to parameters of the role '{role}', "
                    "but the model has none",
                    where=f"model.init_role[{role}]",
                    fix="roles are " + ", ".join(sorted(set(roles.values()))),
                ).concerning(plugins=(owner,))
            for name in chosen:
                self.claims[name].add(owner, init, line)
        return {name: (one.owner, one.resolve()) for name, one in sorted(self.claims.items())}


class ModelSlots:
    """The slots of the model outside attention, each declared once, and their resolution.

    Args:
        geometry: the shape of the model.
        rope_base: base of the rotary frequencies.
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
        self.linear: dict[str, Claim[Node]] = {}  # leaf -> its matrix product
        self.loop: Claim[Loop | None] = Claim("model.loop", default="each block once")
        self.taps: set[str] = set()  # sites that later nodes read
        self.init = InitSlots()

    def site(self, name: str) -> SiteSpec | None:
        """Resolve a residual site or the input of a part; None if no plugin claims anything there."""
        held = self.residual[name] if name in self.residual else self.inputs[name]
        entries = tuple((key, owner, value) for key, owner, value in held.resolve())
        computed = self.ordered_streams(name)
        return SiteSpec(name, entries, computed) if entries or computed else None

    def ordered_streams(self, site: str | None = None) -> tuple[Node, ...]:
        """Return the streams in an order in which each follows the streams that it reads.

        Args:
            site: the site where they are computed; None: before the blocks.

        Raises:
            PlanError: a cycle among the streams.
        """
        streams = self.streams.resolve()
        nodes = {name: node for name, _, node in streams if self.computed.get(name) == site}
        order, circle = topological({name: node.external for name, node in nodes.items()})
        if circle:
            raise PlanError(
                f"streams {', '.join(circle)} read each other in a cycle",
                where="model.streams",
                fix="take one of the reads away",
            ).concerning(plugins=(self.streams.held[name][0] for name in circle))
        return tuple(nodes[name] for name in order)


class Embed(Sealed):
    """Chain: x (B, T, C) -> x.

    *the lookup* < mix < norm. The result is the value ``x0``.

    ::

        model.embed.norm(UnitNorm)
    """

    def __init__(self, builder: Builder, chain: Chain) -> None:
        self.mix = Anchor(builder, chain, "mix", ("x",))
        self.norm = Anchor(builder, chain, "norm", ("x",))


class ModelBuilder(Builder):
    """The slots of the model outside attention, bound to one plugin.

    Attributes:
        layers: the number of layers.
        dim: C, the width of the residual stream.
        heads: H, the number of query heads.
        kv_heads: K, the number of key-value heads.
        head_dim: D, the width of a head.
        hidden: the hidden width of the MLP.
        vocab: V, the size of the vocabulary.
        rope_base: the configured base of the rotary frequencies.
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
        """Term: the arguments of its forward -> an array ``name``, computed once per micro-batch.

        A stream may read other streams, x0 and the batch; blocks and sites read it by its name.
        With ``at`` it is computed at that place, from the residual stream x (B, T, C) there. Uses are
        data-dependent coefficients of many sources at once, or further lanes beside the residual stream
        (hyper-connections): streams at .mid and .out compute the new lanes from the earlier ones and from
        ``sublayer``, the output that joins there. It can be read at that place and after it.

        ::

            model.stream("bigram_table", BigramEmbedding, buckets=65536)
            model.stream("mix_3", Coefficients, at="layers.3.in")

        Args:
            name: the array's name.
            cls: a Module class.
            at: a residual site, layers.i.attention or layers.i.mlp; None: before the blocks.
            reads: argument of ``forward`` -> name of the value passed for it; default: the argument's own name.
            arguments: constructor arguments, JSON values.

        Raises:
            PlanError: a reserved name, no identifier, or an unknown site.
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
        """Expose the residual stream after ``site`` (layers.i.in, .mid, .out), or an attention array, as a tap.

        Later layers may read arrays of an attention too: ``layers.i.attention.q``, ``.k``, ``.v``
        and ``.y``, as the chain ``attn.out`` receives them: q (B, T, H, D) and k (B, T, K, D)
        rotated, unless a layout defers the rotation; v (B, T, K, D) with its terms; y (B, T, H, D)
        after that chain. In decoding, taps hold the new positions only.

        ::

            model.tap("layers.0.attention.v", name="first_value")

        Args:
            site: the place whose array is read.
            name: the argument name in a node's ``forward``; without one, only residual sites can use the tap,
                as a source, so a tap of an attention array needs a name.

        Returns:
            The tap's name: ``name``, or the site.

        Raises:
            PlanError: an unknown site, a reserved name, or no identifier.
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

        The residual stream after a site is the sum over its sources of coefficient x source. The coefficients
        of carry and sublayer are claims; several plugins may add coefficients to any other source. A Module
        returns a coefficient of its source's shape and dtype, or with 1 in place of sizes, such as
        (B, T, 1) or (C,): the norm of a sublayer's output is the coefficient gain / RMS(sublayer), (B, T, C).

        Args:
            site: layers.i.in, .mid (attention joins), .out (the MLP joins), or final.
            source: carry or sublayer (both with coefficient 1 unless claimed), x0, a stream, or a tap.
            coefficient: a number, a schedule, a Learned, or a Module class.
            reads: argument of ``forward`` -> name of the value passed for it; default: the argument's own name.
            arguments: constructor arguments of the Module, JSON values.

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

        The part's input, before its norm, becomes the sum over its sources of coefficient x source; the
        residual stream itself does not change. The coefficient of carry is a claim; carry is the residual
        stream there, or for q, k and v the input of their attention. q, k and v are each normed with that
        attention's norm.

        ::

            model.input("layers.3.attention.v", "x0", Learned(0.0))

        Args:
            part: layers.i.attention, .attention.q, .attention.k, .attention.v or .mlp.
            source: carry (with coefficient 1 unless claimed), x0, a stream, or a tap of an earlier layer.
            coefficient: a number, a schedule, a Learned, or a Module class.
            reads: argument of ``forward`` -> name of the value passed for it; default: the argument's own name.
            arguments: constructor arguments of the Module, JSON values.

        Raises:
            PlanError: an unknown part; while resolving, a part that another plugin leaves out.
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
        """Claim: x (B, T, C), window, documents -> (B, T, C), a whole attention; None: the layer has none.

        The slots of the replaced attention are removed. Only ``window`` and ``documents`` stay open, each if
        ``forward`` has an argument of that name. It receives the claimed value or None: the number of keys that
        a query sees, its own included; int32 (B, S) over all S positions, of which the queries are the last T.

        ::

            model.attention(-1, None)
        """
        claim, own = self._slots.sublayer["attention", self._layer(layer)], ("x", *vars(Masks()))
        self._place(claim, cls, arguments, own)

    def mlp(self, layer: int, cls: type | None, **arguments: Any) -> None:
        """Claim: x (B, T, C) -> (B, T, C), a whole MLP; None: the layer has none.

        A class with kernels of one device may name as ``written_as`` a class that computes the same
        from the same parameters by ops; its own forward does so for arrays that the kernels do not
        take. Such a run also loads where the plugin cannot train; exported modeling files have that class.

        ::

            model.mlp(0, ReluSquared)
        """
        self._place(self._slots.sublayer["mlp", self._layer(layer)], cls, arguments)

    def norm(self, site: str, cls: type | None, **arguments: Any) -> None:
        """Claim: x (B, T, C) -> (B, T, C), the norm at layers.i.attention, .mlp or final; None: no norm.

        ::

            model.norm("final", UnitNorm)
        """
        if site not in self._slots.norm:
            known = "norms are at layers.i.attention, layers.i.mlp and final"
            raise PlanError(f"plugin '{self._owner}': there is no norm at '{site}'", fix=known)
        self._place(self._slots.norm[site], cls, arguments)

    def linear(
        self, leaf: str, cls: type, *, reads: Mapping[str, str] | None = None, **arguments: Any
    ) -> None:
        """Claim: x (..., C), weight (O, C) -> (..., O), the matrix product of the linear layer ``leaf``.

        Its forward takes x and weight first. In the core's attention (q, k, v, o) and SwiGLU (gate,
        up, down) it may have further arguments: fields, streams, taps, schedule values.

        ::

            model.linear("layers.0.attention.q", LowRank, rank=8)

        A class whose product is linear in x may define ``folded(weight, own)`` on NumPy arrays: it returns
        the weight (O, C) whose plain product is the same; ``own`` holds the class's parameters by name.
        An export then merges it into the weight. Such a product may have no further arguments.

        Args:
            leaf: the path of the linear layer.
            cls: a Module class.
            reads: argument of ``forward`` -> name of the value passed for it; default: the argument's own name.
            arguments: constructor arguments, JSON values.
        """
        node = self._node(f"model.linear[{leaf}]", ("x", "weight"), cls, arguments, reads=reads)
        folds = hasattr(cls, "folded")
        if node.reads[:2] != ("x", "weight") or (folds and node.external):
            raise self._refusal(
                node.slot,
                f"{cls.__name__}.forward takes ({', '.join(node.reads)}), and is called with "
                f"(x, weight) {'alone, which are folded' if folds else 'first'}",
            )
        claim: Claim[Node] = Claim(node.slot, default="x W^T", also=(leaf,), order=time_of(leaf))
        self._slots.linear.setdefault(leaf, claim).add(self._owner, node)

    def loop(self, first: int, last: int, times: int | Schedule) -> None:
        """Claim: blocks ``first`` to ``last`` run ``times`` times, one round after the other.

        ::

            model.loop(2, 5, stages((0, 1), (0.75, 2)))

        Each round starts from the output of the previous round and reads the same streams, taps and x0 as
        the first; a tap inside the loop holds the value of the last round. The rounds share parameters, whose
        gradients are summed. In decoding each round has its own KV cache. Evaluation and generation use the
        number of rounds at the end of the run.

        ``times=1`` changes nothing but refuses another plugin's loop: for a plugin that passes arrays from
        each block to the next, since a further round would read the arrays from before the first round.

        Args:
            first: index of the first block.
            last: index of the last block, inclusive.
            times: the number of rounds, an integer; with ``stages`` a step is compiled for each number.

        Raises:
            PlanError: unknown blocks, or an invalid number; while resolving, a node in one of the blocks
                that emits terms or statistics, which exist once per step.
        """
        first, last = self._layer(first), self._layer(last)
        staged = isinstance(times, Stages) and min(times.all()) >= 1
        if first > last or not (staged or (isinstance(times, int) and times >= 1)):
            what = f"layers {first} to {last}, {times!r} times"
            fix = "first <= last; times=2, or stages((0, 1), (0.75, 2))"
            raise self._refusal("model.loop", what, fix=fix)
        loop = Loop(self._owner, first, last, self._setting("loop", times))
        self._slots.loop.add(self._owner, None if times == 1 else loop)

    def init(self, parameter: str, init: Any, **arguments: Any) -> None:
        """Claim: (rng, shape) -> float32, a parameter's initial values; or an initialiser.

        ::

            model.init("head.weight", zeros)
        """
        value = self._init(f"model.init[{parameter}]", init, arguments)
        self._slots.init.claims[parameter].add(self._owner, value)

    def init_role(self, role: str, init: Any, **arguments: Any) -> None:
        """Claim: as ``model.init``, for every parameter with a role (attention.o), of any plugin or the core."""
        value = self._init(f"model.init_role[{role}]", init, arguments)
        self._slots.init.roles.append((self._owner, role, value, call_site()))

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
            what = f"names layer {layer} of a model of {self.layers} layer{'s' * (self.layers > 1)}"
            fix = f"name layers from 0 to {self.layers - 1} (or -{self.layers} to -1)"
            raise PlanError(f"plugin '{self._owner}' {what}", fix=fix)
        return layer % self.layers

    def _site(self, site: str) -> Terms[Any]:
        if site not in self._slots.residual:
            raise PlanError(
                f"plugin '{self._owner}': there is no residual site '{site}'",
                fix=f"sites are layers.i.in, .mid, .out (i < {self.layers}) and final; taps are "
                "also of layers.i.attention.q, .k, .v and .y",
            )
        return self._slots.residual[site]
