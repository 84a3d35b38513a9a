"""Code generation for a layer's attention: its class, and the rotary tables shared between layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minillm_core.inspection import Node
from minillm_hf.own.copying import CannotWriteError
from minillm_hf.own.draft import Class, Draft, Reads
from minillm_hf.own.known import check_known
from minillm_hf.own.literals import Lines, given_as


def attention(
    draft: Draft, layer: int, spec: Any, taps: Sequence[str], apart: Sequence[str]
) -> tuple[Class, str, list[str]]:
    """Generate a layer's attention; return its class, constructor arguments and further inputs.

    ``taps``: those of q, k, v and y that later layers read; ``apart``: those of q, k and v with an
    input of their own.
    """
    check_known(spec)
    reads = Reads(draft, "attention")
    make, run = Lines(), Lines()
    take = draft.copier.take_part
    take("Module"), take("Linear")
    arguments: dict[str, str] = {"rope": rope(draft, spec)}
    if spec.window is not None:
        arguments["window"] = draft.number(spec.window)
    if spec.scale is not None:
        arguments["scale"] = draft.number(spec.scale)
    make += [
        "super().__init__()",
        "C, H, K, D = geometry.dim, geometry.heads, geometry.kv_heads, geometry.head_dim",
        'self.name = f"layers.{geometry.layer}.attention"',
        "self.head_dim = D",
        "self.q = Linear(C, H * D)",
        "self.k = Linear(C, K * D)",
        "self.v = Linear(C, K * D)",
        "self.o = Linear(H * D, C)",
        *(f"self.{name} = {name}" for name in arguments),
    ]
    for attribute, nodes in (
        ("qk", spec.before_rope),
        ("shift", spec.after_rope),
        ("v_terms", spec.v),
        ("out", spec.out),
    ):
        if nodes:
            made = ", ".join(f'"{node.name}": {draft.made(node)}' for node in nodes)
            make.append(f"self.{attribute} = {{{made}}}")
    for attribute, node in (("layout", spec.layout), ("positions", spec.rope.positions)):
        if node is not None:
            make.append(f"self.{attribute} = {draft.made(node)}")

    def call(attribute: str, node: Node, own: Mapping[str, str]) -> str:
        at = f'self.{attribute}["{node.name}"]'
        name = f'f"{{self.name}}.{attribute}.{node.name}"'
        return draft.call(at, node, own, reads.local, name=name, shape="(B, T)")

    run += ["ops, (B, T, _) = self.ops, x.shape"]

    def product(leaf: str, x: str) -> str:
        node = draft.products.get(f"layers.{layer}.attention.{leaf}")
        more = [reads.local(one) for one in node.reads[2:]] if node is not None else []
        return f"self.{leaf}({', '.join([x, *more])})"

    for one in "qkv":
        made = product(one, f"{one}_in" if one in apart else "x")
        run.append(f"{one} = ops.reshape({made}, (B, T, -1, self.head_dim))")
    rotated = "q, k = ops.rotate(q, k, self.rope(positions))"
    for node in spec.before_rope:
        run.append(f"q, k = {call('qk', node, {'q': 'q', 'k': 'k', 'x': 'x'})}")
    if (node := spec.rope.positions) is not None:
        name = 'f"{self.name}.positions"'
        given = draft.call("self.positions", node, {"x": "x"}, reads.local, name=name)
        run.append(f"positions = {given}")
    after = spec.layout is not None and draft.outline(spec.layout).rope == "after"
    if not after:
        run.append(rotated)
    for node in spec.after_rope:
        run.append(f"q, k = {call('shift', node, {'q': 'q', 'k': 'k', 'x': 'x'})}")
    added = [call("v_terms", node, {"v": "v", "x": "x"}) for node in spec.v]
    if added:
        run.append(f"v = v + {' + '.join(added)}")
    how = "".join(f", {name}=self.{name}" for name in ("window", "scale") if name in arguments)
    if spec.core is not None:
        joins = 1 if spec.layout is None else draft.outline(spec.layout).joins
        if joins != 1:  # the layout joins heads: the core has fewer
            sizes = f"heads=H // {joins}, kv_heads=K // {joins}"
            make.append(f"geometry = replace(geometry, {sizes})")
        make.append(f"self.core = {draft.made(spec.core)}")

    def by_core(own: Mapping[str, str]) -> None:
        """Generate the call of a plugin's attention function."""
        if {"mask", "distance"}.intersection(spec.core.reads):
            take("visible")
            given = ", ".join(own[one] for one in ("window", "documents"))
            run.append(
                f"mask, distance = visible(ops, {own['q']}.shape[1], keys.shape[1], {given})"
            )
        own = {**own, "x": "x", "k": "keys", "v": "values", "mask": "mask"}
        own["distance"] = "distance"
        name = 'f"{self.name}.core"'
        given = draft.call("self.core", spec.core, own, reads.local, name=name)
        run.append(f"y = {given}  # (B, T, H, D)")

    window, scale = (f"self.{n}" if n in arguments else "None" for n in ("window", "scale"))
    alone = spec.core is None or not draft.outline(spec.core).keeps  # else all columns are kept
    slides = ", {} - 1" if alone and "window" in arguments else ""  # keys visible to later queries
    kept = f"cache.extend(self.name, (k, v){slides.format('self.window')})"
    if spec.layout is None and spec.core is not None:
        run.append(f"keys, values = (k, v) if cache is None else {kept}")
        scale = "self.head_dim**-0.5" if scale == "None" else scale
        by_core({"q": "q", "window": window, "documents": "None", "scale": scale})
    elif spec.layout is None:
        run += [
            f"keys, values = (k, v) if cache is None else {kept}",
            f"y = ops.attention(q, keys, values{how})  # (B, T, H, D)",
        ]
    else:
        take("Call")
        documents = reads.local("documents") if spec.documents is not None else "None"
        run.append(
            f"call = self.layout.enter(Call(q, k, v, positions, {window}, {documents}, {scale}))"
        )
        if after:
            run += [
                "queries, keys = ops.rotate(call.q, call.k, self.rope(call.positions))",
                "call = call._replace(q=queries, k=keys)",
            ]
        run += [
            "kept = (call.k, call.v, call.documents)",
            "keys, values, seen = kept if cache is None else cache.extend(self.name, kept"
            f"{slides.format('call.window')})",
        ]
        if spec.core is None:
            run += [
                "y = ops.attention(",
                "    call.q, keys, values, scale=call.scale, window=call.window, documents=seen",
                ")",
            ]
        else:
            scale = "self.head_dim**-0.5" if scale == "None" else "call.scale"
            given = {"window": "call.window", "documents": "seen", "scale": scale}
            by_core({"q": "call.q", **given})
        run.append("y = self.layout.leave(y)  # (B, T, H, D)")
        outline = draft.outline(spec.layout)
        if outline.terms or outline.statistics:
            raise CannotWriteError(f"the layout of {spec.layout.owner} emits terms")
    for node in spec.out:
        own = {one: one for one in "yqkvx"}
        run.append(f"y = {call('out', node, own)}")
    results = [product("o", "ops.reshape(y, (B, T, -1))"), *taps]
    run.append(f"return {', '.join(results)}")
    text = (
        "class @NAME@(Module):\n"
        '    """Causal self-attention of @LAYERS@: x (B, T, C) -> (B, T, C)."""\n\n'
        f"    def __init__(self, geometry, {', '.join(arguments)}):\n{make.block(8)}\n\n"
        f"    def forward(self, x, positions, cache{''.join(f', {one}_in' for one in apart)}"
        f"{reads.parameters}):\n{run.block(8)}"
    )
    return draft.class_of("Attention", text, layer), given_as(arguments), reads.names


def rope(draft: Draft, spec: Any) -> str:
    """Generate a layer's rotary tables, once for all layers with the same; return their variable."""
    its, g = spec.rope, draft.spec.geometry
    check_known(its)
    draft.copier.take_part("Rope")
    if its.frequencies is None:
        draft.copier.take_part("llama_frequencies")
        theta = f"llama_frequencies(geometry.head_dim, {its.base!r})"
    else:
        theta = draft.function(its.frequencies, "geometry.head_dim")
    if its.scaling is not None:
        theta = draft.function(its.scaling, theta)
    stretch = 1 if spec.layout is None else draft.outline(spec.layout).stretch
    length = "geometry.positions" + (f" * {stretch}" if stretch != 1 else "")
    made = f"Rope({theta}, {length})"
    if made not in draft.ropes:
        draft.ropes.append(made)
    index = draft.ropes.index(made)
    assert g is not None
    return f"rope{index + 1}" if index else "rope"
