"""The slots of one layer's attention."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from minillm_core.errors import PlanError
from minillm_core.nn.attention import CORE_GIVES, AttentionSpec, DocumentMask, Layout, entered
from minillm_core.nn.node import ModelShape, Node, Setting
from minillm_core.nn.reference import Function
from minillm_core.nn.rope import RopeSpec, Staged
from minillm_core.optim.schedules import Schedule, Stages
from minillm_core.plugins.builders.base import Anchor, Builder, Sealed, ValueTable
from minillm_core.plugins.slots import Chain, Claim, Terms, clash_fix, time_of


class AttentionSlots:
    """The slots of one layer's attention, each declared once, and their resolution.

    Args:
        geometry: the shape of the model, with this layer's index.
        base: the base of the rotary frequencies.
        layered: the plugins with an option ``layers``.
    """

    def __init__(self, geometry: ModelShape, base: float, layered: Collection[str] = ()) -> None:
        self.geometry, self.base, self.layered = geometry, base, layered
        self.layer = geometry.layer or 0
        order = time_of(f"layers.{self.layer}.attention")
        dim, at = geometry.head_dim, f"layers.{geometry.layer}.attention"
        formula = f"base^(-2i/{dim}), i < {dim // 2}, base {base:,g}"

        here: dict[str, Any] = {"layered": layered, "order": order}

        def claim(name: str, default: str) -> Claim[Any]:
            return Claim(f"{at}.{name}", default=default, **here)

        self.qk = Chain(f"{at}.qk", ("project", "norm", "shift"), **here)
        self.frequencies: Claim[Function] = claim("rope.frequencies", formula)
        self.expected: list[tuple[str, Function, str, str]] = []  # plugin, function, owner, why
        self.scaling: Claim[Function] = claim("rope.scaling", "the frequencies as they are")
        self.positions: Claim[Node] = claim("rope.positions", "0, 1, 2 ... along the row")
        self.v: Terms[Node] = Terms(f"{at}.v", keyed=False, default="v alone", **here)
        self.layout: Claim[Node] = claim("layout", "heads and positions as they are projected")
        self.core: Claim[Node] = claim("core", "softmax, by the kernel of the op attention")
        self.window: Claim[Setting] = claim("window", "every key up to the query's own")
        self.documents: Claim[DocumentMask] = claim("documents", "every document of the row")
        self.scale: Claim[Setting] = claim("scale", f"{dim}^-1/2 = {dim**-0.5:.4g}")
        self.out = Chain(f"{at}.out", ("correct", "project_out", "gate"), **here)

    def resolve(self) -> AttentionSpec:
        """Resolve the slots to the layer's attention, each claim under its slot's name; raise on a conflict."""
        qk = self.qk.resolve()
        rope = RopeSpec(
            self.base, self.frequencies.resolve(), self.scaling.resolve(), self.positions.resolve()
        )
        named = {one.name: getattr(self, one.name, None) for one in fields(AttentionSpec)}
        claims = {name: slot.resolve() for name, slot in named.items() if isinstance(slot, Claim)}
        self._check_aligned(claims["core"], claims["layout"])
        self._check_expected(rope.frequencies)
        return AttentionSpec(
            rope=rope,
            before_rope=tuple(node for anchor, node in qk if anchor != "shift"),
            after_rope=tuple(node for anchor, node in qk if anchor == "shift"),
            v=tuple(node for _, _, node in self.v.resolve()),
            out=tuple(node for _, node in self.out.resolve()),
            **claims,
        )

    def _check_expected(self, held: Function | None) -> None:
        """Refuse a plugin that needs rotary frequencies which no plugin sets in this layer."""
        for who, wanted, whose, why in self.expected:
            if held is None or held.reference != wanted.reference:
                raise PlanError(
                    f"plugin '{who}' {why}: it builds on the frequencies of '{whose}' in layer "
                    f"{self.layer}",
                    where=f"{self.frequencies.where}, as of {whose}",
                    fix=f"add '{whose}', or leave that layer out of '{who}'",
                ).concerning(self.frequencies.where, plugins=(who,))

    def _check_aligned(self, core: Node | None, layout: Node | None) -> None:
        """Refuse a core that does not fit the layout.

        Either the core reads a value per token and the layout makes several positions of each token,
        or the core cannot be built for the layout's number of heads.
        """
        if core is None or layout is None:
            return
        layout_class: Any = layout.cls
        tokens, problem = [name for name in core.reads if name not in CORE_GIVES], ""
        if tokens and layout_class.stretch > 1:
            problem = (
                f"'{core.owner}' reads '{tokens[0]}' token by token in {self.core.where}, and "
                f"'{layout.owner}' makes several positions of each token"
            )
        else:
            try:
                core.make(entered(self.geometry, layout_class))
            except PlanError as error:
                problem = f"{error.what}, in the layout of '{layout.owner}'"
        if problem:
            way = clash_fix(core.owner, layout.owner, self.layered)
            raise PlanError(problem, where=self.core.where, fix=way).concerning(
                self.core.where, plugins=(core.owner, layout.owner)
            )


class QK(Sealed):
    """Chain: q (B, T, H, D), k (B, T, K, D), x (B, T, C) -> (q, k).

    project < norm < *the rotation* < shift.

    ::

        attn.qk.norm(NormQK, eps=1e-6)
    """

    def __init__(self, builder: Builder, chain: Chain) -> None:
        own = ("q", "k", "x")
        self.project = Anchor(builder, chain, "project", own)
        self.norm = Anchor(builder, chain, "norm", own)
        self.shift = Anchor(builder, chain, "shift", own)


class Out(Sealed):
    """Chain: y (B, T, H, D), q, k, v, x (B, T, C) -> y (B, T, H, D), before the projection.

    correct < project_out < gate. q and k are rotated, unless a layout defers the rotation to the core;
    v (B, T, K, D) includes its terms.

    ::

        attn.out.gate(HeadGate, width=12)
    """

    def __init__(self, builder: Builder, chain: Chain) -> None:
        own = ("y", "q", "k", "v", "x")
        self.correct = Anchor(builder, chain, "correct", own)
        self.project_out = Anchor(builder, chain, "project_out", own)
        self.gate = Anchor(builder, chain, "gate", own)


class RopeClaims(Sealed):
    """Claims on the rotary embedding (RoPE): frequencies, then their scaling; positions independently.

    The functions of frequencies and scaling run on the host, while the model is built.
    """

    def __init__(self, builder: AttentionBuilder, slots: AttentionSlots) -> None:
        self._builder, self._slots = builder, slots

    def frequencies(self, function: Callable[..., np.ndarray], **arguments: Any) -> None:
        """Claim: head_dim -> (D/2,), the frequencies in radians per position, a NumPy array.

        Args:
            function: a module-level function, called as ``function(head_dim, **arguments)``.

        ::

            attn.rope.frequencies(half_truncated, base=10_000.0)
        """
        value = self._builder._function(self._slots.frequencies.where, function, arguments)
        self._slots.frequencies.add(self._builder._owner, value)

    def expects(self, function: Callable[..., np.ndarray], *, of: str, why: str) -> None:
        """Require that ``function`` sets this layer's frequencies; otherwise the plan is refused.

        Args:
            function: the function that ``of`` claims with ``attn.rope.frequencies``.
            of: the other plugin's name.
            why: how this plugin depends on it, in words, for the error.

        ::

            attn.rope.expects(half_truncated, of="half_rope", why="shifts unrotated pairs")
        """
        builder, slots = self._builder, self._slots
        wanted = builder._function(slots.frequencies.where, function, {})
        slots.expected.append((builder._owner, wanted, of, why))

    def scaling(self, function: Callable[..., np.ndarray], **arguments: Any) -> None:
        """Claim: frequencies (D/2,) -> (D/2,), NumPy arrays (YaRN and similar context extension).

        Args:
            function: a module-level function, called as ``function(frequencies, **arguments)``.
            arguments: JSON values; one may be ``stages(...)``: the function is called once for each
                of its numbers, and each stage of the run has its own cos/sin tables.

        ::

            attn.rope.scaling(yarn, factor=4.0, length=1024)

        Raises:
            PlanError: two staged arguments, or a schedule that is not staged.
        """
        builder, where = self._builder, self._slots.scaling.where
        schedules = {k: v for k, v in arguments.items() if isinstance(v, Schedule)}
        staged = {k: v for k, v in schedules.items() if isinstance(v, Stages)}
        if len(schedules) > 1 or schedules != staged:
            raise builder._refusal(
                where,
                f"{', '.join(schedules)} cannot follow "
                f"{'these schedules' if len(schedules) > 1 else 'this schedule'}",
                fix="one argument may be stages((0, 128), (0.5, 256)): tables are made beforehand",
            )
        constants = {k: v for k, v in arguments.items() if k not in schedules}
        owner, reference, given = builder._function(where, function, constants)
        named = ((key, builder._staged(key, v)) for key, v in staged.items())
        full = tuple(sorted((*given, *named)))
        self._slots.scaling.add(owner, Function(owner, reference, full))

    def positions(self, cls: type, **arguments: Any) -> None:
        """Claim: x (B, T, C) -> int32 (T,) or (B, T), the position of each token.

        ::

            attn.rope.positions(CountedByDocument)
        """
        node = self._builder._node(self._slots.positions.where, ("x",), cls, arguments)
        self._slots.positions.add(self._builder._owner, node)


class AttentionBuilder(Builder):
    """The slots of one layer's attention, bound to one plugin; the hook is called once per layer.

    Attributes:
        layer: this layer's index, from 0.
        layers: the number of layers.
        heads: H, the number of query heads.
        kv_heads: K, the number of key-value heads; H is a multiple of it.
        head_dim: D, the width of a head.
        seq_len: T, the length of a training row.
    """

    _slots: AttentionSlots

    def __init__(self, owner: str, values: ValueTable, slots: AttentionSlots) -> None:
        super().__init__(owner, values, slots)
        geometry = slots.geometry
        self.layer = slots.layer
        self.layers = geometry.layers
        self.heads, self.kv_heads = geometry.heads, geometry.kv_heads
        self.head_dim, self.seq_len = geometry.head_dim, geometry.positions
        self.qk, self.out = QK(self, slots.qk), Out(self, slots.out)
        self.rope = RopeClaims(self, slots)

    def _staged(self, argument: str, schedule: Stages) -> Staged:
        name = f"{self._owner}.rope.{argument}"
        place = f"layers.{self.layer}"
        return Staged(self._values.add(self._owner, name, schedule, place), schedule.all())

    def v(
        self,
        cls: type,
        *,
        name: str | None = None,
        reads: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        """Term: v (B, T, K, D), x (B, T, C) -> (B, T, K, D), which is added to v.

        Every term is computed from the projected v, before any term is added.

        Args:
            cls: a Module class.
            name: a suffix that distinguishes several terms of one plugin.
            reads: argument of ``forward`` -> name of the field, stream, tap or schedule value passed for it;
                default: the argument's own name.
            arguments: constructor arguments, JSON values.

        ::

            attn.v(ValueEmbedding, lr_mul=0.1)
        """
        node = self._node(self._slots.v.where, ("v", "x"), cls, arguments, name, reads=reads)
        self._slots.v.add(self._owner, node.name, node)

    def layout(self, cls: type, **arguments: Any) -> None:
        """Claim: call -> call, and y -> y (B, T, H, D) on the way back: a :class:`Layout`.

        With ``rope = "after"``, q and k are rotated after the layout's ``enter``, and ``qk.shift`` is closed.

        ::

            attn.layout(Interleave)
        """
        where = self._slots.layout.where
        if not (isinstance(cls, type) and issubclass(cls, Layout)):
            raise self._refusal(where, f"{cls!r} is not a Layout")
        node = self._node(where, (), cls, arguments, call="enter")
        if len(node.reads) != 1 or cls.reads:
            raise self._refusal(
                where,
                f"{cls.__name__}.enter takes ({', '.join(node.reads)}), and is called with a Call "
                "alone",
            )
        node = replace(node, reads=("call",), external=())
        self._slots.layout.add(self._owner, node)
        if cls.rope == "after":
            self.qk.shift.close("its layout rotates q and k after they are rearranged")

    def core(self, cls: type, **arguments: Any) -> None:
        """Claim: q, k, v, x, mask, distance, window, documents, scale -> y, in place of softmax.

        Only scores, weights and their product with v are replaced. q (B, T, H, D) is already rotated and
        laid out; k and v (B, S, K, D) cover all S positions, of which the queries are the last T; y has
        q's shape. Query head h reads key-value head h // (H / K). In decoding k and v come from the KV
        cache. This layer does not call the kernel of the op ``attention``.

        ``mask`` is True where a query may see a key: bool (T, S), or (B, 1, T, S) with document masking.
        ``distance`` is the query's position minus the key's, int32 (T, S). ``window`` (keys per query) and
        ``documents`` (int32 (B, S)) are None if unset; the mask already applies both. ``scale`` is a
        number. x (B, T, C) is the sublayer's input at the queries.

        The class may set ``calls = ("attention",)`` if it calls that kernel itself, and may define a
        method ``flops(keys)``: FLOPs per token, forward and backward, over that many keys (default
        12 H D keys).

        ::

            attn.core(Sinks, start=0.0)

        Args:
            cls: a Module class.
            arguments: constructor arguments, JSON values.
        """
        where = self._slots.core.where
        self._slots.core.add(self._owner, self._node(where, (*CORE_GIVES, "x"), cls, arguments))

    def window(self, number: int | Schedule, *, name: str | None = None) -> None:
        """Claim: the attention window: how many keys a query sees, its own included.

        Args:
            number: a constant or a schedule; with ``stages`` a step is compiled for each window.
            name: names the schedule, if groups of layers follow different schedules.

        ::

            attn.window(stages((0, 128), (0.5, 256)))
        """
        slot = "window" if name is None else f"window.{name}"
        setting = self._setting(slot, number, f"layers.{self.layer}")
        if setting.constant is not None and not (type(number) is int and number > 0):
            raise self._refusal(
                self._slots.window.where,
                f"a window of {number} keys",
                fix="a whole number from 1 on, or a schedule",
            )
        self._slots.window.add(self._owner, setting)

    def documents(self) -> None:
        """Claim: document masking: a token attends only within its document, by the batch's ``documents``.

        ::

            attn.documents()
        """
        self._slots.documents.add(self._owner, DocumentMask(self._owner))

    def scale(self, number: float | Schedule) -> None:
        """Claim: the factor on the attention logits (default D^-1/2).

        ::

            attn.scale(0.12)

        Raises:
            PlanError: a number that is not above 0.
        """
        setting = self._setting("scale", number, f"layers.{self.layer}")
        if setting.constant is not None and setting.constant <= 0:
            raise self._refusal("scale", f"{number} is not above 0")
        self._slots.scale.add(self._owner, setting)
