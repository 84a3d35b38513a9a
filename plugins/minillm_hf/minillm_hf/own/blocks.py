"""Code generation for a layer's block: its sublayers, and the weighted sums (sites) between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minillm_core import Learned
from minillm_core.inspection import Node, Omitted, Setting
from minillm_hf.own.attention import attention
from minillm_hf.own.copying import CannotWriteError, identifier
from minillm_hf.own.draft import Class, Draft, Reads, looks_back, resolved
from minillm_hf.own.known import check_known
from minillm_hf.own.literals import Lines, repr_of, variable


def block(draft: Draft, layer: int, spec: Any) -> str:
    """Generate a block's class; return the code that constructs it, and add its call to ``draft.calls``."""
    check_known(spec)
    reads, make, run = Reads(draft, "block"), Lines(), Lines()
    parts = {"Module"}
    arguments = ""
    make += ["super().__init__()", 'self.name = f"layers.{geometry.layer}"']
    named: list[Class] = []

    def norm(attribute: str, claim: Any) -> Callable[[str], str]:
        """Generate the norm before a sublayer; return a function from a variable to its normed code."""
        if isinstance(claim, Omitted):
            return lambda x: x
        if claim is None:
            parts.add("RMSNorm")
            make.append(f"self.{attribute} = RMSNorm(geometry)")
            return lambda x: f"self.{attribute}({x})"
        make.append(f"self.{attribute} = {draft.made(claim)}")
        name = f'f"{{self.name}}.{attribute}"'
        at = f"self.{attribute}"
        return lambda x: draft.call(at, claim, {"x": x}, reads.local, name=name)

    apart = {one.name.rpartition(".")[2]: one for one in spec.apart}
    given: dict[str, str] = {}

    def input_of(part: str, x: str, into: str) -> str:
        """Generate the input of a sublayer or projection; return its variable."""
        if part not in apart:
            return x
        at = f'given["{part}"]'
        made = site(draft, at, apart[part], None, reads, run, into=into, carry=x)
        given.update({part: made} if made else {})
        return into

    def add_site(attribute: str, spec: Any, sublayer: str | None) -> None:
        if made := site(draft, attribute, spec, sublayer, reads, run):
            make.append(f"self.{attribute} = {made}")

    add_site("site_in", spec.site_in, None)
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
            make.append(f"self.attention = {draft.made(spec.attention)}")
            run.append(f"h = {h}")
            name = 'f"{self.name}.attention"'
            check_known(spec.seen)
            window = "None" if spec.seen.window is None else draft.number(spec.seen.window)
            own = {"x": "h", "window": window, "documents": "None"}  # a row is one document
            y = draft.call("self.attention", spec.attention, own, reads.local, name=name)
        else:
            own_inputs = [one for one in "qkv" if one in apart]
            for one in own_inputs:
                into = input_of(one, x, f"{one}_in")
                if (value := normed(into)) != into:
                    run.append(f"{into} = {value}")
            cls, arguments, read = attention(draft, layer, spec.attention, inner, own_inputs)
            named.append(cls)
            names = ", ".join(one.partition("=")[0] for one in arguments.split(", "))
            passed = ", ".join(f"{n}={n}" for n in names.split(", "))
            make.append(f"self.attention = @{draft.classes.index(cls)}@(geometry, {passed})")
            more = "".join(f", {one}_in" for one in own_inputs)
            more += "".join(f", {reads.local(one)}" for one in read)
            y = f"self.attention({h}, positions, cache{more})"
            if inner:
                run.append(f"{', '.join(['h', *(f'at_{one}' for one in inner)])} = {y}")
                y = "h"
    add_site("site_mid", spec.site_mid, y)
    if "mid" in spec.taps:
        run.append("at_mid = x")
    y = None
    if not isinstance(spec.mlp, Omitted):
        h = norm("mlp_norm", spec.mlp_norm)(input_of("mlp", "x", "given"))
        if further := [one for one in draft.products if one.startswith(f"layers.{layer}.mlp")]:
            raise CannotWriteError(f"the product of {further[0]} reads more than x")
        if spec.mlp is None:
            parts.add("SwiGLU")
            make.append("self.mlp = SwiGLU(geometry)")
            y = f"self.mlp({h})"
        else:
            make.append(f"self.mlp = {draft.made(spec.mlp)}")
            name = 'f"{self.name}.mlp"'
            y = draft.call("self.mlp", spec.mlp, {"x": h}, reads.local, name=name)
    add_site("site_out", spec.site_out, y)
    if given:
        made = ", ".join(f'"{part}": {one}' for part, one in given.items())
        make.append(f"self.given = {{{made}}}")
    taps = [tapped[one] for one in spec.taps if one in tapped]
    streams = draft.handed_on[layer]
    run.append(f"return {', '.join(['x', *taps, *map(reads.local, streams)])}")
    for part in sorted(parts):  # a set's order differs between processes
        draft.copier.take_part(part)
    names = [one.partition("=")[0] for one in arguments.split(", ")] if arguments else []
    text = (
        "class @NAME@(Module):\n"
        '    """@Layers@: x (B, T, C) -> (B, T, C)."""\n\n'
        f"    def __init__(self, {', '.join(['geometry', *names])}):\n{make.block(8)}\n\n"
        f"    def forward(self, x, positions, cache{reads.parameters}):\n{run.block(8)}"
    )
    cls = draft.class_of("Block", text, layer)
    with_arguments = "".join(f", {one}" for one in [arguments] if one)
    more = "".join(f", {draft.read(one)}" for one in reads.names)
    results = [
        "x",
        *(identifier(f"layers.{layer}.{one}") for one in spec.taps if one in tapped),
        *map(variable, streams),
    ]
    draft.calls.append(
        f"{', '.join(results)} = self.layers[{layer}](x, positions, {draft.cache}{more})"
    )
    if "out" in spec.taps:
        draft.calls.append(f"{identifier(f'layers.{layer}.out')} = x")
    return f"@{draft.classes.index(cls)}@(replace(geometry, layer={layer}){with_arguments})"


def site(
    draft: Draft,
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
    """Generate the sum of coefficient x source into a variable; return the code that constructs its module.

    ``carry``: the variable with the residual stream; ``name``: the prefix of cache names.
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
        call = draft.call(at, node, own, reads.local, name=name + path)
        run.append(f"{reads.make(node.name)} = {call}")
        computed.append(f'"{node.name}": {draft.made(node)}')

    def scaled(key: str, value: str, coefficient: Any) -> str:
        if isinstance(coefficient, Setting):
            number = coefficient.constant
            number = draft.values[coefficient.value] if coefficient.value else number
            return value if number == 1.0 else f"{value} * {float(number)!r}"  # type: ignore[arg-type]
        if isinstance(coefficient, Node):
            made[key] = draft.made(coefficient)
            if looks_back(coefficient.cls or resolved(coefficient.reference)):
                raise CannotWriteError(f"the coefficient of {key} looks back on earlier columns")
            given = [own[r] if r in own else reads.local(r) for r in coefficient.reads]
            outline = draft.outline(coefficient)
            first = "[0]" * bool(outline.terms or outline.statistics)
            return f"{value} * self.{attribute}({', '.join([repr_of(key), *given])}){first}"
        if not isinstance(coefficient, Learned):
            raise CannotWriteError(f"the coefficient of {key} is a {type(coefficient).__name__}")
        draft.copier.take_part("Learned")
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
    draft.copier.take_part("Site")
    parts = [f"{{{', '.join(computed)}}}"] if computed else []
    parts += [f"{key}={made[key]}" for key in made]
    return f"Site({', '.join(parts)})"
