"""Causal self-attention with all its slots; from top to bottom, the path of a tensor through it.

q, k, v = x Wq, x Wk, x Wv
q, k    = attn.qk nodes before the rotation (project < norm), rotate, after it (shift)
v       = v + attn.v terms
y       = leave(attention(enter(q, k, v)))          attn.layout, .core, .window, .documents, .scale
y       = attn.out nodes (correct < project_out < gate)
out     = y Wo
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from minillm_core.nn.init import fan_in_residual
from minillm_core.nn.layers import Linear
from minillm_core.nn.module import Module
from minillm_core.nn.node import MASKING, ModelShape, Node, Scope, Setting, check_shape
from minillm_core.nn.rope import RopeSpec, rope_of
from minillm_core.ops.arrays import visible

TAPPED = ("k", "q", "v", "y")
"""Arrays that later layers may read, as ``attention.v``: those of the kernel call, and y before Wo."""

CORE_GIVES = ("q", "k", "v", "mask", "distance", "window", "documents", "scale")
"""Arguments that an ``attn.core`` may name: those of the kernel call, and the masks; x in addition."""


class Call(NamedTuple):
    """The arguments of the attention kernel; a layout turns one call into another."""

    q: Any  # (B, T, H, D)
    k: Any  # (B, T, K, D)
    v: Any  # (B, T, K, D)
    positions: Any = None  # None: 0, 1, 2 ...; int32 (T,) or (B, T)
    window: Any = None  # how many keys a query sees; None: all earlier ones
    documents: Any = None  # int32 (B, T): a query sees only keys of equal id; None: all
    scale: Any = None  # of the logits; None: D^-1/2


class Layout(Module):
    """The base of a claim on ``attn.layout``: another arrangement of heads and positions.

    ``rope = "after"``: the core rotates the q and k that ``enter`` returns, at the positions of that
    call, and ``shift`` may not be claimed on that layer. ``stretch``: the number of positions that
    ``enter`` makes of each position of the row, in the row's order: decoding enters only the new
    columns, at their positions, and appends their keys and values to the cache. ``joins``: the number
    of heads merged into one; an ``attn.core`` is built for heads / joins heads.
    """

    rope = "before"
    stretch = 1
    joins = 1

    def enter(self, call: Call) -> Call:
        """Return the kernel call in the new arrangement."""
        raise NotImplementedError

    def leave(self, y: Any) -> Any:
        """Return the y of the entered call, rearranged to (B, T, H, D)."""
        raise NotImplementedError


@dataclass(frozen=True)
class DocumentMask:
    """A claim that masks other documents: tokens attend only within their own document."""

    owner: str
    inputs = ("documents",)


@dataclass(frozen=True)
class Masks:
    """The masks of a plugin's own attention: the slots of its layer that its ``forward`` names."""

    window: Setting | None = None
    documents: DocumentMask | None = None


UNMASKED = Masks()
"""Plain causal attention: every key up to the query's own position, of every document."""


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention, resolved."""

    rope: RopeSpec
    before_rope: tuple[Node, ...] = ()
    after_rope: tuple[Node, ...] = ()
    v: tuple[Node, ...] = ()
    layout: Node | None = None
    core: Node | None = None
    window: Setting | None = None
    documents: DocumentMask | None = None
    scale: Setting | None = None
    out: tuple[Node, ...] = ()


class Attention(Module):
    """Causal self-attention with its slots: x (B, T, C) -> (B, T, C)."""

    def __init__(
        self, geometry: ModelShape, spec: AttentionSpec, taps: tuple[str, ...] = ()
    ) -> None:
        super().__init__()
        self.taps = taps  # of TAPPED
        heads, kv_heads, head_dim = geometry.heads, geometry.kv_heads, geometry.head_dim
        self.head_dim = head_dim
        q_axes, kv_axes, o_axes = ("heads", "dim"), ("kv_heads", "dim"), ("dim", "heads")
        self.q = Linear(geometry.dim, heads * head_dim, role="attention.q", axes=q_axes)
        self.k = Linear(geometry.dim, kv_heads * head_dim, role="attention.k", axes=kv_axes)
        self.v = Linear(geometry.dim, kv_heads * head_dim, role="attention.v", axes=kv_axes)
        self.o = Linear(
            heads * head_dim,
            geometry.dim,
            role="attention.o",
            axes=o_axes,
            init=fan_in_residual(heads * head_dim, geometry.layers),
        )
        self.qk = {node.name: node.make(geometry) for node in spec.before_rope}
        self.shift = {node.name: node.make(geometry) for node in spec.after_rope}
        self.v_terms = {node.name: node.make(geometry) for node in spec.v}
        self.layout = spec.layout.make(geometry) if spec.layout else None
        self.core = spec.core.make(entered(geometry, self.layout)) if spec.core else None
        self.positions = spec.rope.positions.make(geometry) if spec.rope.positions else None
        self.out = {node.name: node.make(geometry) for node in spec.out}
        self.window, self.scale = spec.window, spec.scale
        self.within_documents = spec.documents is not None
        self.rope_after = self.layout is not None and self.layout.rope == "after"
        self.stretch = 1 if self.layout is None else self.layout.stretch
        self.rope = rope_of(geometry, spec.rope, geometry.positions * self.stretch)

    def forward(self, x: Any, scope: Scope, apart: Mapping[str, Any] | None = None) -> Any:
        """Attend: x (B, T, C) -> (B, T, C); ``scope`` contains the nodes' other inputs.

        ``apart``: separate inputs of q, k or v, by name, (B, T, C).
        """
        ops, (B, T, _) = self.ops, x.shape
        given = {"q": x, "k": x, "v": x, **(apart or {})}
        q, k, v = (
            ops.reshape(leaf(given[name], scope), (B, T, -1, self.head_dim))
            for name, leaf in (("q", self.q), ("k", self.k), ("v", self.v))
        )
        for node in self.qk.values():
            q, k = scope.apply(node, {"q": q, "k": k, "x": x}, like=("q", "k"))
        if self.positions is None:
            positions = scope.positions(ops)
        else:
            found = scope.apply(self.positions, {"x": x})
            positions = check_shape(self.positions, found, x.shape[:2], x.shape[1:2])
        if not self.rope_after:
            q, k = ops.rotate(q, k, self.rope.at(scope.reads)(positions))
        for node in self.shift.values():
            q, k = scope.apply(node, {"q": q, "k": k, "x": x}, like=("q", "k"))
        added = [scope.apply(node, {"v": v, "x": x}, like=("v",)) for node in self.v_terms.values()]
        for term in added:  # each computed from the value before the sum
            v = v + term

        window = None if self.window is None else self.window.of(scope.reads)
        scale = None if self.scale is None else self.scale.of(scope.reads)
        documents = scope.reads[MASKING] if self.within_documents else None
        call = Call(q, k, v, positions, window, documents, scale)
        y = self.attend(call, x, scope)  # (B, T, H, D)

        for node in self.out.values():
            y = scope.apply(node, {"y": y, "q": q, "k": k, "v": v, "x": x}, like=("y",))
        arrays = {"k": k, "q": q, "v": v, "y": y}
        scope.tapped |= {f"attention.{name}": arrays[name] for name in self.taps}
        return self.o(ops.reshape(y, (B, T, -1)), scope)

    def attend(self, call: Call, x: Any, scope: Scope) -> Any:
        """Call the kernel, or a plugin's core, within the layout: (B, T, H, D) -> (B, T, H, D)."""
        if self.layout is not None:
            call = scope.split_emitted(self.layout, self.layout.enter(call))
        if self.rope_after:
            q, k = self.ops.rotate(call.q, call.k, self.rope.at(scope.reads)(call.positions))
            call = call._replace(q=q, k=k)
        y = scope.attend(self, call, x)
        return y if self.layout is None else self.layout.leave(y)

    def attended(self, call: Call, x: Any, scope: Scope) -> Any:
        """Attend from the queries of x to all keys that they may see: (B, T, H, D)."""
        q, scale = call.q, call.scale
        if scale is not None and not isinstance(scale, (int, float)):
            # A schedule value: kernels take a constant, and a scale rounded to bfloat16 would be off.
            q, scale = self.ops.like(self.ops.astype(q, "float32") * scale, q), 1.0
        call = call._replace(q=q, scale=scale)
        if self.core is not None:
            return self.by_core(self.core, call, x, scope)
        q, k, v, _, window, documents, scale = call
        return self.ops.attention(q, k, v, scale=scale, window=window, documents=documents)

    def by_core(self, core: Any, call: Call, x: Any, scope: Scope) -> Any:
        """Attend with a plugin's core; keys and values are those of all columns."""
        ops, queries, keys = self.ops, call.q.shape[1], call.k.shape[1]
        own = {name: getattr(call, name) for name in ("q", "k", "v", "window", "documents")}
        own |= {"x": x, "scale": call.q.shape[-1] ** -0.5 if call.scale is None else call.scale}
        if {"mask", "distance"}.intersection(core.bound):
            at = ops.arange(keys)
            own["distance"] = ops.expand_dims(at[keys - queries :], 1) - at  # int32 (T, S)
            own["mask"] = visible(own["distance"], call.window, call.documents)
        return scope.apply(core, own, like=("q",))


def entered(geometry: ModelShape, layout: Any) -> ModelShape:
    """Return the model shape with the numbers of heads after a layout has joined them."""
    joins = 1 if layout is None else layout.joins
    return replace(geometry, heads=geometry.heads // joins, kv_heads=geometry.kv_heads // joins)
