"""Modeling files, written from a plan: its slots as straight-line code, of which only what is filled is there.

The specification of the model is walked from the embedding to the logits. Layers that come out alike
share their classes. A slot or a field that is not known here is refused by its name: what a model
computes is written whole or not at all.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from minillm_core import Learned, Module, Plan, SigmoidCap, TanhCap, __version__
from minillm_core.inspection import DISTRIBUTIONS, Node, Omitted, Setting, Staged
from minillm_hf.own.copying import CORE, CannotWriteError, Copier, Key, identifier, part_source
from minillm_hf.own.known import KNOWN_ATTRIBUTES, attributes, check_known, names
from minillm_hf.own.tidying import WIDTH

TRANSFORMERS, MLX = "modeling_minillm.py", "modeling_mlx.py"


@dataclass(frozen=True)
class Framework:
    """A program that loads a modeling file: its name, what the file is made of, what it calls there."""

    program: str
    parts: str
    closing: tuple[str, ...]


FRAMEWORKS: Mapping[str, Framework] = {
    TRANSFORMERS: Framework("Transformers", "parts_torch", ("MinillmForCausalLM",)),
    MLX: Framework("mlx-lm", "parts_mlx", ("ModelArgs", "Model")),
}


AT_HAND = ("ids", "documents", "positions")
"""Batch fields that are known where a text is continued."""

RESERVED = names(
    "B T C H K D q k v x y z h ops ids keys values queries kept seen call "
    "carry cache start every fields positions self at_in at_mid at_q at_k at_v at_y mask distance "
    "q_in k_in v_in given"
)
"""Names of variables in what is written."""


def banner(title: str) -> str:
    """Write a heading of a file."""
    return f"# {'-' * 10} {title} {'-' * (84 - len(title))}\n\n\n"


MODEL = banner("the model")
"""What stands before the model, in each file."""


@dataclass(eq=False)
class Class:
    """A class that is written: its text without a name, and the layers that have it."""

    kind: str
    text: str
    layers: list[int] = field(default_factory=list)


class Lines(list[str]):
    """Lines of a function's body."""

    def block(self, indent: int) -> str:
        """Join them, indented."""
        return "\n".join(" " * indent + line if line else "" for line in self)


def reference(key: Key) -> str:
    """Stand for the name of a copied definition, which is settled at the end."""
    return f"@{key[0]}:{key[1]}@"


class Writer:
    """The modeling file of a plan's model.

    Args:
        plan: the plan.
        framework: whose file.
        specials: ids of special tokens, by name.
    """

    def __init__(self, plan: Plan, framework: Framework, specials: Mapping[str, int]) -> None:
        self.plan, self.spec, self.framework = plan, plan.spec, framework
        self.specials = specials
        path = Path(__file__).with_name(f"{framework.parts}.py")
        parts = part_source(f"{__package__}.{framework.parts}", path)
        given = {"SIZES", "GEOMETRY", "Decoder", "batch_fields"}
        self.copier = Copier(parts, given, attributes() - KNOWN_ATTRIBUTES)
        numbers = plan.values(1.0)
        self.values: dict[str, float] = {
            name: int(number) if name in plan.staged else float(number)
            for name, number in numbers.items()
        }
        read = (n for n in plan.spec.streams if f"streams.{n.name}" not in plan.spec.training_alone)
        self.streams = {node.name: node for node in read}
        self.aliases = dict(plan.spec.taps)
        self.products = {leaf: node for leaf, node in plan.spec.linears if node.external}
        self.handed_on = _handed_on(plan.spec)
        self.declared = {name: owner for name, owner, _ in plan.batch_fields}
        self.classes: list[Class] = []
        self.ropes: list[str] = []
        self.needed: dict[str, None] = {}  # what the decoder computes for its layers

    # ---- the file

    def write(self) -> str:
        """Write the file, as it is before :func:`finished`.

        Raises:
            CannotWriteError: something in the plan cannot be written.
        """
        check_known(self.spec)
        decoder = self._decoder()
        extra = self._batch_fields()
        for text in (decoder, extra, *(one.text for one in self.classes)):
            self.copier.note_ops(re.sub(r"@\S+?@", "Named", text))
        for part in ("Geometry", "Module", "Ops"):
            self.copier.take_part(part)
        self.copier.need("replace")
        copied = list(self.copier.uses)
        for part in self.framework.closing:
            self.copier.take_part(part)
        self.copier.finish_ops()
        parts = self.copier.parts.module
        base = self._closure([key for key in copied if key[0] == parts])
        plugins = [key for key in self.copier.uses if key[0] != parts]
        closing = [key for key in self.copier.uses if key[0] == parts and key not in base]
        names = self.copier.names()
        sections = [
            self._head(),
            "\n".join(self._imports()),
            self.copier.written(base),
            banner("parts of techniques") + self.copier.written(plugins) if plugins else "",
            MODEL + self._sizes(),
            extra,
            *(self._class_text(one) for one in self.classes),
            decoder,
            banner(f"what {self.framework.program} calls") + self.copier.written(closing),
        ]
        text = "\n\n\n".join(filter(None, sections)) + "\n"
        text = text.replace('"""\n\n\nfrom __future__', '"""\n\nfrom __future__')
        text = re.sub(r"@([\w.]+):(\w+)@", lambda found: names[found[1], found[2]], text)
        return text

    def _closure(self, keys: Iterable[Key]) -> set[Key]:
        """Return keys with all that they use."""
        pending, found = list(keys), set[Key]()
        while pending:
            key = pending.pop()
            if key not in found:
                found.add(key)
                pending += self.copier.uses[key].values()
        return found

    def _head(self) -> str:
        """Write what the file is, and the techniques in the words of their authors."""
        plan = self.plan
        model = plan.config.model
        lines = [
            f"A language model for {self.framework.program}, in one file: written by minillm "
            f"{__version__}, which it does not need.",
            "",
            f"{model.layers} layers, {model.dim} wide, {model.heads} heads ({model.kv_heads} of keys and "
            f"values), {model.vocab:,} tokens; plan {plan.hash[:12]}.",
            "Licence of this file: MIT, as minillm's, from whose modules its parts are copied.",
            "Copyright (c) 2026 The minillm authors. SPDX-License-Identifier: MIT",
        ]
        shaping = {one.owner for one in plan.placements if one.shapes}
        theirs = [one for one in plan.plugins if one.distribution not in DISTRIBUTIONS]
        if named := [one for one in theirs if one.name in shaping]:
            from_where = ", ".join(f"{one.name} ({one.distribution or 'a file'})" for one in named)
            lines.append(
                f"What is copied from {from_where} is its authors', under their licence, which this file "
                "does not know."
            )
        for active in plan.active:
            if active.name not in shaping:
                continue
            words = inspect.getdoc(sys.modules[type(active.plugin).__module__]) or ""
            options = ", ".join(f"{k}={v!r}" for k, v in active.plugin.options().items())
            lines += ["", f"{active.name} {'-' * max(4, 96 - len(active.name))}"]
            lines += textwrap.wrap(f"({options})" * bool(options), WIDTH)
            lines += words.splitlines()
        text = (
            "\n".join(line.rstrip() for line in lines).replace("\\", "\\\\").replace('"""', "'''")
        )
        return f'"""{re.sub(chr(10) + "{3,}", chr(10) * 2, text).rstrip()}\n"""'

    def _imports(self) -> Iterator[str]:
        imports = sorted(
            self.copier.imports.values(), key=lambda one: (one.name is not None, str(one))
        )
        standard = [
            one for one in imports if one.module.partition(".")[0] in sys.stdlib_module_names
        ]
        yield "from __future__ import annotations\n"
        for group in (standard, [one for one in imports if one not in standard]):
            plain = [str(one) for one in group if one.name is None]
            named: dict[str, list[str]] = {}
            for one in group:
                if one.name is not None:
                    named.setdefault(one.module, []).append(str(one).partition(" import ")[2])
            lines = plain + [
                f"from {home} import {', '.join(sorted(of))}" for home, of in sorted(named.items())
            ]
            yield "\n".join(lines) + "\n" * (group is standard)

    def _sizes(self) -> str:
        g = self.spec.geometry
        given = {one.name: getattr(g, one.name) for one in fields(g) if one.name != "layer"}
        sizes = "".join(f"    {name}={value!r},\n" for name, value in given.items())
        checked = "".join(
            f'    "{key}": {value!r},\n' for key, value in sizes_of(self.plan).items()
        )
        return (
            f"GEOMETRY = Geometry(\n{sizes})\n\n"
            f"SIZES = {{  # which config.json has to have\n{checked}}}"
        )

    def _class_text(self, one: Class) -> str:
        where = located(one.layers)
        text = one.text.replace("@NAME@", self._class_name(one)).replace("@LAYERS@", where)
        return text.replace("@Layers@", where[0].upper() + where[1:])

    def _class_name(self, one: Class) -> str:
        alike = [other for other in self.classes if other.kind == one.kind]
        return one.kind if len(alike) == 1 else f"{one.kind}{alike.index(one) + 1}"

    def _class(self, kind: str, text: str, layer: int) -> Class:
        found = next((o for o in self.classes if (o.kind, o.text) == (kind, text)), None)
        if found is None:
            self.classes.append(found := Class(kind, text))
        found.layers.append(layer)
        return found

    # ---- nodes

    def _made(self, node: Node) -> str:
        """Write the construction of a node."""
        if not isinstance(node, Node):
            raise CannotWriteError(f"a {type(node).__name__} stands where a part is expected")
        cls = node.cls or _resolved(node.reference)
        module, _, name = node.reference.partition(":")
        if _of_core(module):
            if name not in self.copier.parts.top:
                raise CannotWriteError(f"{node.owner} uses the core's {name}")
            module = self.copier.parts.module
        key = self.copier.take(module, name)
        given = [f"{key}={_literal(value, node)}" for key, value in node.arguments]
        if "geometry" in inspect.signature(cls.__init__).parameters:
            given.insert(0, "geometry")
        return f"{reference(key)}({', '.join(given)})"

    def _call(
        self,
        at: str,
        node: Node,
        own: Mapping[str, str],
        local: Callable[[str], str],
        *,
        name: str,
        shape: str = "x.shape[:2]",
    ) -> str:
        """Write the call of a node on its arguments."""
        outline = node.make(self.spec.geometry)
        emits = bool(outline.terms or outline.statistics)
        if keeps := outline.keeps:
            self.copier.take_part("keeping")
            given = ", ".join(
                "None" if r in keeps else own[r] if r in own else local(r) for r in node.reads
            )
            places = tuple(node.reads.index(one) for one in keeps)
            states = tuple(index for index, one in enumerate(keeps) if one in outline.recurrent)
            more = f", states={states!r}" if states else ""
            return f"keeping({at}, cache, {name}, ({given},), kept={places!r}{more})"
        given = ", ".join(own[read] if read in own else local(read) for read in node.reads)
        if _looks_back(node.cls or _resolved(node.reference)):
            self.copier.take_part("look_back")
            more = ", emits=True" * emits
            return f"look_back({at}, cache, {name}, {given}, shape={shape}{more})"
        return f"{at}({given})" + "[0]" * emits

    def _number(self, setting: Setting) -> str:
        number = setting.constant if setting.value is None else self.values[setting.value]
        return repr(number)

    def _value(self, name: str) -> str | None:
        """Write a schedule's value at the end of the run; None: it is none."""
        if name not in self.values:
            return None
        number = self.values[name]
        return repr(number) if isinstance(number, int) else f"ops.scalar({number!r})"

    # ---- attention

    def _attention(
        self, layer: int, spec: Any, taps: Sequence[str], apart: Sequence[str]
    ) -> tuple[Class, str, list[str]]:
        """Write a layer's attention: its class, its arguments, and what it reads.

        ``taps``: of q, k, v and y, those that later layers read; ``apart``: of q, k and v, those
        with an input of their own.
        """
        check_known(spec)
        reads = Reads(self, "attention")
        make, run = Lines(), Lines()
        take = self.copier.take_part
        take("Module"), take("Linear")
        arguments: dict[str, str] = {"rope": self._rope(spec)}
        if spec.window is not None:
            arguments["window"] = self._number(spec.window)
        if spec.scale is not None:
            arguments["scale"] = self._number(spec.scale)
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
                made = ", ".join(f'"{node.name}": {self._made(node)}' for node in nodes)
                make.append(f"self.{attribute} = {{{made}}}")
        for attribute, node in (("layout", spec.layout), ("positions", spec.rope.positions)):
            if node is not None:
                make.append(f"self.{attribute} = {self._made(node)}")

        def call(attribute: str, node: Node, own: Mapping[str, str]) -> str:
            at = f'self.{attribute}["{node.name}"]'
            name = f'f"{{self.name}}.{attribute}.{node.name}"'
            return self._call(at, node, own, reads.local, name=name, shape="(B, T)")

        run += ["ops, (B, T, _) = self.ops, x.shape"]

        def product(leaf: str, x: str) -> str:
            node = self.products.get(f"layers.{layer}.attention.{leaf}")
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
            given = self._call("self.positions", node, {"x": "x"}, reads.local, name=name)
            run.append(f"positions = {given}")
        after = spec.layout is not None and _outline(spec.layout, self.plan).rope == "after"
        if not after:
            run.append(rotated)
        for node in spec.after_rope:
            run.append(f"q, k = {call('shift', node, {'q': 'q', 'k': 'k', 'x': 'x'})}")
        added = [call("v_terms", node, {"v": "v", "x": "x"}) for node in spec.v]
        if added:
            run.append(f"v = v + {' + '.join(added)}")
        how = "".join(f", {name}=self.{name}" for name in ("window", "scale") if name in arguments)
        if spec.core is not None:
            if spec.layout is not None and _outline(spec.layout, self.plan).joins != 1:
                raise CannotWriteError(f"{spec.core.owner} stands inside a layout that joins heads")
            make.append(f"self.core = {self._made(spec.core)}")

        def by_core(own: Mapping[str, str]) -> None:
            """Write the call of a plugin's function of attention."""
            if {"mask", "distance"}.intersection(spec.core.reads):
                take("visible")
                given = ", ".join(own[one] for one in ("window", "documents"))
                run.append(f"mask, distance = visible(ops, T, keys.shape[1], {given})")
            own = {**own, "x": "x", "k": "keys", "v": "values", "mask": "mask"}
            own["distance"] = "distance"
            name = 'f"{self.name}.core"'
            given = self._call("self.core", spec.core, own, reads.local, name=name)
            run.append(f"y = {given}  # (B, T, H, D)")

        window, scale = (f"self.{n}" if n in arguments else "None" for n in ("window", "scale"))
        if spec.layout is None and spec.core is not None:
            run.append(
                "keys, values = (k, v) if cache is None else cache.extend(self.name, (k, v))"
            )
            scale = "self.head_dim**-0.5" if scale == "None" else scale
            by_core({"q": "q", "window": window, "documents": "None", "scale": scale})
        elif spec.layout is None:
            run += [
                "keys, values = (k, v) if cache is None else cache.extend(self.name, (k, v))",
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
                "keys, values, seen = kept if cache is None else cache.extend(self.name, kept)",
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
            outline = _outline(spec.layout, self.plan)
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
        return self._class("Attention", text, layer), _given(arguments), reads.names

    def _rope(self, spec: Any) -> str:
        """Write a layer's rotary tables, once for all layers that have the same; return their name."""
        rope, g = spec.rope, self.spec.geometry
        check_known(rope)
        self.copier.take_part("Rope")
        if rope.frequencies is None:
            self.copier.take_part("llama_frequencies")
            theta = f"llama_frequencies(geometry.head_dim, {rope.base!r})"
        else:
            theta = self._function(rope.frequencies, "geometry.head_dim")
        if rope.scaling is not None:
            theta = self._function(rope.scaling, theta)
        stretch = 1 if spec.layout is None else _outline(spec.layout, self.plan).stretch
        length = "geometry.positions" + (f" * {stretch}" if stretch != 1 else "")
        made = f"Rope({theta}, {length})"
        if made not in self.ropes:
            self.ropes.append(made)
        index = self.ropes.index(made)
        assert g is not None
        return f"rope{index + 1}" if index else "rope"

    def _function(self, function: Any, first: str) -> str:
        owner, named, arguments = function
        key = self.copier.take(*named.split(":"))
        more = "".join(
            f", {name}={self.values[value.value] if isinstance(value, Staged) else _plain(value, owner)!r}"
            for name, value in arguments
        )
        return f"{reference(key)}({first}{more})"

    # ---- blocks

    def _block(self, layer: int, spec: Any) -> str:
        """Write a block's class; return its construction. ``self.calls`` has its call."""
        check_known(spec)
        reads, make, run = Reads(self, "block"), Lines(), Lines()
        parts = {"Module"}
        arguments = ""
        make += ["super().__init__()", 'self.name = f"layers.{geometry.layer}"']
        named: list[Class] = []

        def norm(attribute: str, claim: Any) -> Callable[[str], str]:
            """Write the norm before a sublayer; return what it makes of a variable."""
            if isinstance(claim, Omitted):
                return lambda x: x
            if claim is None:
                parts.add("RMSNorm")
                make.append(f"self.{attribute} = RMSNorm(geometry)")
                return lambda x: f"self.{attribute}({x})"
            make.append(f"self.{attribute} = {self._made(claim)}")
            name = f'f"{{self.name}}.{attribute}"'
            at = f"self.{attribute}"
            return lambda x: self._call(at, claim, {"x": x}, reads.local, name=name)

        apart = {one.name.rpartition(".")[2]: one for one in spec.apart}
        given: dict[str, str] = {}

        def input_of(part: str, x: str, into: str) -> str:
            """Write what a part is given; return the variable that holds it."""
            if part not in apart:
                return x
            at = f'given["{part}"]'
            made = self._site(at, apart[part], None, reads, run, into=into, carry=x)
            given.update({part: made} if made else {})
            return into

        def site(attribute: str, spec: Any, sublayer: str | None) -> None:
            if made := self._site(attribute, spec, sublayer, reads, run):
                make.append(f"self.{attribute} = {made}")

        site("site_in", spec.site_in, None)
        inner = [one for one in "kqvy" if f"attention.{one}" in spec.taps]
        tapped = {"in": "at_in", "mid": "at_mid"}
        tapped |= {f"attention.{one}": f"at_{one}" for one in inner}
        if unknown := {*spec.taps} - {*tapped, "out"}:
            raise CannotWriteError(f"the tap layers.{layer}.{min(unknown)} is not known")
        if "in" in spec.taps:
            run.append("at_in = x")
        y = None
        if not isinstance(spec.attention, Omitted):
            normed = norm("attention_norm", spec.attention_norm)
            x = input_of("attention", "x", "given")
            h = normed(x)
            if isinstance(spec.attention, Node):
                make.append(f"self.attention = {self._made(spec.attention)}")
                run.append(f"h = {h}")
                name = 'f"{self.name}.attention"'
                own = {"x": "h"}
                y = self._call("self.attention", spec.attention, own, reads.local, name=name)
            else:
                own_inputs = [one for one in "qkv" if one in apart]
                for one in own_inputs:
                    variable = input_of(one, x, f"{one}_in")
                    if (value := normed(variable)) != variable:
                        run.append(f"{variable} = {value}")
                cls, arguments, read = self._attention(layer, spec.attention, inner, own_inputs)
                named.append(cls)
                names = ", ".join(one.partition("=")[0] for one in arguments.split(", "))
                passed = ", ".join(f"{n}={n}" for n in names.split(", "))
                make.append(f"self.attention = @{self.classes.index(cls)}@(geometry, {passed})")
                more = "".join(f", {one}_in" for one in own_inputs)
                more += "".join(f", {reads.local(one)}" for one in read)
                y = f"self.attention({h}, positions, cache{more})"
                if inner:
                    run.append(f"{', '.join(['h', *(f'at_{one}' for one in inner)])} = {y}")
                    y = "h"
        site("site_mid", spec.site_mid, y)
        if "mid" in spec.taps:
            run.append("at_mid = x")
        y = None
        if not isinstance(spec.mlp, Omitted):
            h = norm("mlp_norm", spec.mlp_norm)(input_of("mlp", "x", "given"))
            if further := [one for one in self.products if one.startswith(f"layers.{layer}.mlp")]:
                raise CannotWriteError(f"the product of {further[0]} reads more than x")
            if spec.mlp is None:
                parts.add("SwiGLU")
                make.append("self.mlp = SwiGLU(geometry)")
                y = f"self.mlp({h})"
            else:
                make.append(f"self.mlp = {self._made(spec.mlp)}")
                name = 'f"{self.name}.mlp"'
                y = self._call("self.mlp", spec.mlp, {"x": h}, reads.local, name=name)
        site("site_out", spec.site_out, y)
        if given:
            made = ", ".join(f'"{part}": {one}' for part, one in given.items())
            make.append(f"self.given = {{{made}}}")
        taps = [tapped[one] for one in spec.taps if one in tapped]
        streams = self.handed_on[layer]
        run.append(f"return {', '.join(['x', *taps, *map(reads.local, streams)])}")
        for part in parts:
            self.copier.take_part(part)
        names = [one.partition("=")[0] for one in arguments.split(", ")] if arguments else []
        text = (
            "class @NAME@(Module):\n"
            '    """@Layers@: x (B, T, C) -> (B, T, C)."""\n\n'
            f"    def __init__(self, {', '.join(['geometry', *names])}):\n{make.block(8)}\n\n"
            f"    def forward(self, x, positions, cache{reads.parameters}):\n{run.block(8)}"
        )
        cls = self._class("Block", text, layer)
        with_arguments = "".join(f", {one}" for one in [arguments] if one)
        more = "".join(f", {self._read(one)}" for one in reads.names)
        results = [
            "x",
            *(identifier(f"layers.{layer}.{one}") for one in spec.taps if one in tapped),
            *map(_variable, streams),
        ]
        self.calls.append(f"{', '.join(results)} = self.layers[{layer}](x, positions, cache{more})")
        if "out" in spec.taps:
            self.calls.append(f"{identifier(f'layers.{layer}.out')} = x")
        return f"@{self.classes.index(cls)}@(replace(geometry, layer={layer}){with_arguments})"

    def _site(
        self,
        attribute: str,
        spec: Any,
        sublayer: str | None,
        reads: Reads,
        run: Lines,
        *,
        into: str = "x",
        carry: str = "x",
        name: str = 'f"{self.name}.',
    ) -> str:
        """Write a sum over sources of coefficient x source, into a variable; return its module's construction.

        ``carry``: the variable with the stream there; ``name``: how the text of a path here begins.
        """
        if spec is None:
            if sublayer is not None:
                run.append(f"x = x + {sublayer}")
            return ""
        check_known(spec)
        sources = [source for source, _, _ in spec.terms]
        made: dict[str, str] = {}
        if sublayer is not None:
            run.append(f"y = {sublayer}")
        if carry == into and any(isinstance(one, Node) for _, _, one in spec.terms):
            run.append(f"carry = {carry}")
            carry = "carry"
        own = {"carry": carry, "sublayer": "y", "x": carry}
        computed = []
        for node in spec.computed:
            at, path = (
                f'self.{attribute}.computed["{node.name}"]',
                f'{attribute}.computed.{node.name}"',
            )
            call = self._call(at, node, own, reads.local, name=name + path)
            run.append(f"{reads.make(node.name)} = {call}")
            computed.append(f'"{node.name}": {self._made(node)}')

        def scaled(key: str, value: str, coefficient: Any) -> str:
            if isinstance(coefficient, Setting):
                number = coefficient.constant
                number = self.values[coefficient.value] if coefficient.value else number
                return value if number == 1.0 else f"{value} * {float(number)!r}"  # type: ignore[arg-type]
            if isinstance(coefficient, Node):
                made[key] = self._made(coefficient)
                if _looks_back(coefficient.cls or _resolved(coefficient.reference)):
                    raise CannotWriteError(
                        f"the coefficient of {key} looks back on earlier columns"
                    )
                given = [own[r] if r in own else reads.local(r) for r in coefficient.reads]
                outline = _outline(coefficient, self.plan)
                first = "[0]" * bool(outline.terms or outline.statistics)
                return f"{value} * self.{attribute}({', '.join([repr_of(key), *given])}){first}"
            if not isinstance(coefficient, Learned):
                raise CannotWriteError(
                    f"the coefficient of {key} is a {type(coefficient).__name__}"
                )
            self.copier.take_part("Learned")
            made[key] = "Learned()"
            return f"{value} * self.{attribute}({repr_of(key)})"

        by_source = {source: one for source, _, one in spec.terms}
        others = [one for one in spec.terms if one[0] not in ("carry", "sublayer")]
        added = []
        for source, value in (("carry", carry), ("sublayer", sublayer and "y")):
            coefficient = by_source.get(source)
            gone = others and isinstance(coefficient, Setting) and coefficient.constant == 0
            if value is not None and not gone:
                added.append(scaled(source, value, coefficient) if coefficient else value)
        for source, owner, coefficient in others:
            key = source.replace(".", "_")
            if sources.count(source) > 1:
                key = f"{key}_{owner}"
            added.append(scaled(key, reads.local(source), coefficient))
        first, *rest = added
        if first not in (into, "carry" if into == "x" else into):  # x is the carry until then
            run.append(f"{into} = {first}")
        run += [f"{into} = {into} + {one}" for one in rest]
        if not made and not computed:
            return ""
        self.copier.take_part("Site")
        parts = [f"{{{', '.join(computed)}}}"] if computed else []
        parts += [f"{key}={made[key]}" for key in made]
        return f"Site({', '.join(parts)})"

    # ---- the decoder

    def _read(self, name: str) -> str:
        """Name what a part reads in the decoder's own function, which is to compute it."""
        if (value := self._value(name)) is not None:
            return value
        self.needed[name] = None
        return _variable(self.aliases.get(name, name))

    def _decoder(self) -> str:
        spec, g = self.spec, self.spec.geometry
        make, self.calls = Lines(), Lines()
        take = self.copier.take_part
        take("Module"), take("Embedding")
        make += ["super().__init__()", "self.embedding = Embedding(geometry.vocab, geometry.dim)"]
        before, after = Lines(), Lines()
        for attribute, nodes in (("embed", spec.embed), ("streams", self.streams.values())):
            if nodes:
                made = ", ".join(f'"{node.name}": {self._made(node)}' for node in nodes)
                make.append(f"self.{attribute} = {{{made}}}")
        for node in spec.embed:
            at, name = f'self.embed["{node.name}"]', repr_of(f"embed.{node.name}")
            given = self._call(at, node, {"x": "x"}, self._read, name=name, shape="ids.shape")
            before.append(f"x = {given}")
        streams = Lines()
        for node in self.streams.values():
            at, name = f'self.streams["{node.name}"]', repr_of(f"streams.{node.name}")
            given = self._call(at, node, {}, self._read, name=name, shape="ids.shape")
            streams.append(f"{_variable(node.name)} = {given}")
        blocks = [self._block(layer, block) for layer, block in enumerate(spec.blocks)]
        reads = Reads(self, "decoder")
        reads.local = lambda name: reads.made.get(name) or self._read(name)  # type: ignore[method-assign]
        if made := self._site("site_final", spec.final, None, reads, after, name='"'):
            make.append(f"self.site_final = {made}")
        if not isinstance(spec.final_norm, Omitted):
            if spec.final_norm is None:
                take("RMSNorm")
                make.append("self.norm = RMSNorm(geometry)")
                after.append("x = self.norm(x)")
            else:
                make.append(f"self.norm = {self._made(spec.final_norm)}")
                own, name = {"x": "x"}, repr_of("norm")
                given = self._call("self.norm", spec.final_norm, own, self._read, name=name)
                after.append(f"x = {given}")
        make += [
            f"rope{index + 1 if index else ''} = {made}" for index, made in enumerate(self.ropes)
        ]
        make += ["self.layers = [", *(f"    {one}," for one in blocks), "]"]
        if not spec.tied:
            take("Linear")
            make.append("self.head = Linear(geometry.dim, geometry.vocab)")
        make += self._products()
        run = Lines(
            [
                "ops, start = self.ops, 0 if cache is None else cache.columns",
                "B, T = ids.shape",
                "positions = ops.arange(start + T)[start:]",
                *self._fields(),
                "x = self.embedding(ids)",
                *before,
            ]
        )
        if "x0" in self.needed:
            run.append("x0 = x")
        run += [*streams, *self.calls, *after]
        run += ["if cache is not None:", "    cache.columns = start + T", "return x"]
        if not re.search(r"\bB\b", "".join(line for line in run if line != "B, T = ids.shape")):
            run[run.index("B, T = ids.shape")] = "T = ids.shape[1]"
        assert g is not None
        text = (
            "class Decoder(Module):\n"
            '    """Tokens in, logits out."""\n\n'
            f"    def __init__(self, geometry):\n{make.block(8)}\n\n"
            "    def hidden(self, ids, cache):\n"
            '        """Compute what the head is given: ids int32 (B, T) -> (B, T, C)."""\n'
            f"{run.block(8)}\n\n"
            "    def logits(self, x):\n"
            '        """Compute x (..., C) -> float32 (..., V)."""\n'
            f"{self._logits().block(8)}"
        )
        names = [self._class_name(one) for one in self.classes]
        for one in self.classes:
            one.text = re.sub(r"@(\d+)@", lambda found: names[int(found[1])], one.text)
        self.copier.given |= set(names)
        return re.sub(r"@(\d+)@", lambda found: names[int(found[1])], text)

    def _logits(self) -> Lines:
        form = self.spec.loss.form
        check_known(form)
        product = "self.head(x)" if not self.spec.tied else "self.embedding.as_linear(x)"
        lines = Lines([f'z = self.ops.astype({product}, "float32")'])
        if form.scale != 1.0:
            lines.append(f"z = z * {form.scale!r}")
        match form.cap:
            case None:
                pass
            case TanhCap(cap=cap):
                lines.append(f"z = {cap!r} * self.ops.tanh(z / {cap!r})")
            case SigmoidCap(a=a, b=b, c=c):
                lines.append(f"z = {a!r} * self.ops.sigmoid((z + {b!r}) / {c!r})")
            case other:
                raise CannotWriteError(f"loss.logits has a cap that is not known here: {other!r}")
        lines.append("return z")
        return lines

    def _products(self) -> Iterator[str]:
        """Write what takes the place of products of leaves, where it is not folded into them."""
        for leaf, node in self.spec.linears:
            if hasattr(node.make(self.spec.geometry), "folded"):
                continue
            self.copier.take_part("ReplacedLinear")
            out, inputs = self.plan.parameters[f"{leaf}.weight"].shape
            yield f"self{_path(leaf)} = ReplacedLinear({inputs}, {out}, {self._made(node)})"

    def _fields(self) -> Iterator[str]:
        """Write the batch fields that parts read, and check that all that they read is known."""
        taps = {f"layers.{i}.{tap}" for i, b in enumerate(self.spec.blocks) for tap in b.taps}
        taps |= {name for names in self.handed_on for name in names}
        for name in self.needed:
            known = (name in AT_HAND, name in self.declared, name in self.streams, name == "x0")
            if not any(known) and name not in taps and name not in self.aliases:
                raise CannotWriteError(
                    f"a part reads {name}, which is not there when a text is continued"
                )
        if "documents" in self.needed:
            yield 'documents = ops.zeros((B, T), "int32")  # a row is one document'
        if "positions" in self.needed:
            yield "positions_of_rows = ops.broadcast_to(positions, (B, T))"
        if wanted := [name for name in self.needed if name in self.declared]:
            yield 'every = ids if cache is None else cache.extend("ids", (ids,))[0]'
            yield "fields = batch_fields(ops.to_numpy(every))"
            for name in wanted:
                yield f'{_variable(name)} = ops.from_numpy(fields["{name}"][:, start:])'

    def _batch_fields(self) -> str:
        """Write the function that computes plugins' batch fields; empty where none is read."""
        wanted = {self.declared[name] for name in self.needed if name in self.declared}
        if not wanted:
            return ""
        lines = Lines(
            [
                "batch = {",
                '    "ids": ids,',
                '    "labels": np.full_like(ids, -1),',
                '    "documents": np.zeros_like(ids),',
                '    "positions": np.broadcast_to(np.arange(ids.shape[1], dtype=ids.dtype), ids.shape),',
                "}",
            ]
        )
        by_name = {one.name: one.plugin for one in self.plan.active}
        for owner in wanted:
            if owner not in self.plan.on_batch:
                raise CannotWriteError(f"{owner} reads a field of the data, which a text has not")
        self.copier.need("np")
        for owner in self.plan.on_batch:
            if owner in wanted:
                key, takes = self._hook(by_name[owner])
                known = {
                    "phase": '"decode"',
                    "vocab": "GEOMETRY.vocab",
                    "progress": "1.0",
                    "specials": repr(dict(self.specials)),
                }
                more = "".join(f", {name}={known[name]}" for name in takes if name != "batch")
                lines.append(f"batch = {reference(key)}().on_batch(batch{more})")
        return (
            "def batch_fields(ids):\n"
            '    """Compute what parts read beside ids: NumPy arrays (B, T), by name."""\n'
            f"{lines.block(4)}\n    return batch"
        )

    def _hook(self, plugin: Any) -> tuple[Key, tuple[str, ...]]:
        """Collect a plugin's ``on_batch`` as a class of its own, its options as constants."""
        cls = type(plugin)
        taken, options, pending = {}, {}, ["on_batch"]
        while pending:
            name = pending.pop()
            function = inspect.getattr_static(cls, name, None)
            if not inspect.isfunction(function):
                value = getattr(plugin, name, None)
                options[name] = _plain(value, cls.__name__)
                continue
            text = inspect.getsource(function)
            taken[name] = text.rstrip()
            for other in re.findall(r"\bself\.(\w+)", text):
                if other not in taken and other not in options and other not in pending:
                    pending.append(other)
        body = [f"    {name} = {value!r}" for name, value in sorted(options.items())]
        text = f'class {cls.__name__}:\n    """Fields of a batch, from its ids."""\n\n'
        text += "\n".join(body) + ("\n\n" if body else "") + "\n\n".join(taken.values())
        key = self.copier.add(cls.__module__, cls.__name__, text)
        takes = tuple(inspect.signature(cls.on_batch).parameters)[1:]
        return key, takes


class Reads:
    """What a class reads besides x, by the names of its function's arguments."""

    def __init__(self, writer: Writer, kind: str) -> None:
        self.writer, self.kind = writer, kind
        self.locals: dict[str, str] = {}
        self.made: dict[str, str] = {}  # streams that are computed here -> their variables

    @property
    def names(self) -> list[str]:
        """What is read, in the order of the arguments."""
        return list(self.locals)

    @property
    def parameters(self) -> str:
        """The arguments, behind others."""
        return "".join(f", {one}" for one in self.locals.values())

    def local(self, name: str) -> str:
        """Name something that is read; a schedule's value is a constant."""
        if (value := self.writer._value(name)) is not None:
            return value.replace("ops.", "self.ops.")
        if name in self.made:
            return self.made[name]
        if name not in self.locals:
            self.locals[name] = self._variable(name)
        return self.locals[name]

    def make(self, name: str) -> str:
        """Name the variable of a stream that is computed here."""
        self.made[name] = made = self._variable(name)
        return made

    def _variable(self, name: str) -> str:
        taken = {*self.locals.values(), *self.made.values(), *RESERVED}
        stem = "earlier" if "." in name else re.sub(r"_\d+$", "", identifier(name))
        stem = {"positions": "positions_of_rows"}.get(stem, stem)
        count, made = 1, stem
        while made in taken:
            count += 1
            made = f"{stem}_{count}"
        return made


def sizes_of(plan: Plan) -> dict[str, Any]:
    """Return the sizes in config.json that have to be those of the file."""
    model = plan.config.model
    return {
        "vocab_size": model.vocab,
        "hidden_size": model.dim,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_width,
    }


def located(layers: Sequence[int]) -> str:
    """Write layers: ``layer 3``, ``layers 0 to 4, 7``."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    said = ", ".join(
        f"{one[0]} to {one[-1]}" if len(one) > 2 else ", ".join(map(str, one)) for one in runs
    )
    return f"layer{'s' if len(layers) > 1 else ''} {said}"


def repr_of(text: str) -> str:
    """Write a text as a literal, in double quotes."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _variable(name: str) -> str:
    """Name a batch field, stream or tap in the decoder."""
    if name == "positions":
        return "positions_of_rows"
    if name == "ids":
        return name
    made = identifier(name)
    return f"{made}_" if made in RESERVED or re.fullmatch(r"rope\d*", made) else made


def _given(arguments: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in arguments.items())


def _path(leaf: str) -> str:
    """Write the attribute that a path leads to."""
    inside = ("qk", "shift", "v_terms", "out", "embed", "streams", "coefficients")
    text, before = "", ""
    for part in leaf.split("."):
        if part.isdigit():
            text += f"[{part}]"
        else:
            text += f'["{part}"]' if before in inside else f".{part}"
        before = part
    return text


def _resolved(named: str) -> type:
    module, _, name = named.partition(":")
    return getattr(sys.modules[module], name)


def _handed_on(spec: Any) -> list[tuple[str, ...]]:
    """List, by layer, the streams computed in it that later parts of the model read."""
    found: list[tuple[str, ...]] = []
    later = {*spec.final.inputs} if spec.final is not None else set()
    later |= {*getattr(spec.final_norm, "inputs", ())}
    for index, block in reversed([*enumerate(spec.blocks)]):
        found.append(tuple(sorted(block.computed & later)))
        later |= {*block.reads()}
        for leaf, node in spec.linears:
            later |= {*node.external} if leaf.startswith(f"layers.{index}.") else set()
    return found[::-1]


def _outline(node: Node, plan: Plan) -> Any:
    return node.make(plan.spec.geometry)


@cache
def _looks_back(cls: type) -> bool:
    """Return whether a module may read earlier columns than those that it computes."""
    own = (one for one in cls.__mro__ if issubclass(one, Module) and not _of_core(one.__module__))
    return any("lookback" in inspect.getsource(one) for one in own)


def _of_core(module: str) -> bool:
    return module.partition(".")[0] == CORE


def _plain(value: Any, owner: str) -> Any:
    """Return a value that can be written as a literal.

    Raises:
        CannotWriteError: it cannot.
    """
    kinds = (int, float, str, bool, type(None))
    if isinstance(value, kinds):
        return value
    if isinstance(value, (tuple, list)):
        return type(value)(_plain(one, owner) for one in value)
    raise CannotWriteError(f"{owner} has {value!r:.60}, which cannot be written as a constant")


def _literal(value: Any, node: Node) -> str:
    return repr(_plain(value, node.owner))
