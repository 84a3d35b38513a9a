"""Code generation for the decoder: from token ids through the layers to the logits."""

from __future__ import annotations

import re
from collections.abc import Iterator

from minillm_core import SigmoidCap, TanhCap
from minillm_core.inspection import Omitted
from minillm_hf.own.blocks import block, site
from minillm_hf.own.copying import CannotWriteError
from minillm_hf.own.draft import Draft, Reads
from minillm_hf.own.known import check_known
from minillm_hf.own.literals import Lines, path_to, repr_of, variable

AT_HAND = ("ids", "documents", "positions")
"""Batch fields that are available during generation."""


def decoder(draft: Draft) -> str:
    """Generate the class ``Decoder``; the classes of its layers are added to the draft."""
    spec, g = draft.spec, draft.spec.geometry
    make, draft.calls = Lines(), Lines()
    take = draft.copier.take_part
    take("Module"), take("Embedding")
    make += ["super().__init__()", "self.embedding = Embedding(geometry.vocab, geometry.dim)"]
    before, after = Lines(), Lines()
    for attribute, nodes in (("embed", spec.embed), ("streams", draft.streams.values())):
        if nodes:
            made = ", ".join(f'"{node.name}": {draft.made(node)}' for node in nodes)
            make.append(f"self.{attribute} = {{{made}}}")
    for node in spec.embed:
        at, name = f'self.embed["{node.name}"]', repr_of(f"embed.{node.name}")
        given = draft.call(at, node, {"x": "x"}, draft.read, name=name, shape="ids.shape")
        before.append(f"x = {given}")
    streams = Lines()
    for node in draft.streams.values():
        at, name = f'self.streams["{node.name}"]', repr_of(f"streams.{node.name}")
        given = draft.call(at, node, {}, draft.read, name=name, shape="ids.shape")
        streams.append(f"{variable(node.name)} = {given}")
    blocks = layers(draft)
    reads = Reads(draft, "decoder")
    reads.local = lambda name: reads.made.get(name) or draft.read(name)  # type: ignore[method-assign]
    if made := site(draft, "site_final", spec.final, None, reads, after, name='"'):
        make.append(f"self.site_final = {made}")
    if not isinstance(spec.final_norm, Omitted):
        if spec.final_norm is None:
            take("RMSNorm")
            make.append("self.norm = RMSNorm(geometry)")
            after.append("x = self.norm(x)")
        else:
            make.append(f"self.norm = {draft.made(spec.final_norm)}")
            own, name = {"x": "x"}, repr_of("norm")
            given = draft.call("self.norm", spec.final_norm, own, draft.read, name=name)
            after.append(f"x = {given}")
    make += [f"rope{index + 1 if index else ''} = {made}" for index, made in enumerate(draft.ropes)]
    make += ["self.layers = [", *(f"    {one}," for one in blocks), "]"]
    if not spec.tied:
        take("Linear")
        make.append("self.head = Linear(geometry.dim, geometry.vocab)")
    make += products(draft)
    run = Lines(
        [
            "ops, start = self.ops, 0 if cache is None else cache.columns",
            "B, T = ids.shape",
            "positions = ops.arange(start + T)[start:]",
            *fields(draft),
            "x = self.embedding(ids)",
            *before,
        ]
    )
    if "x0" in draft.needed:
        run.append("x0 = x")
    run += [*streams, *draft.calls, *after]
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
        f"{logits(draft).block(8)}"
    )
    names = [draft.class_name(one) for one in draft.classes]
    for one in draft.classes:
        one.text = re.sub(r"@(\d+)@", lambda found: names[int(found[1])], one.text)
    draft.copier.given |= set(names)
    return re.sub(r"@(\d+)@", lambda found: names[int(found[1])], text)


def layers(draft: Draft) -> list[str]:
    """Generate the layers and their calls, with a loop for repeated ones; return their constructions."""
    made, loop = [], draft.spec.loop
    looped = range(loop.first, loop.last + 1) if loop else range(0)
    for layer, one in enumerate(draft.spec.blocks):
        if loop and layer == loop.first:
            check_known(loop)
            draft.copier.take_part("Turn")
            draft.calls += [
                f"for turn in range({draft.number(loop.times)}):",
                "    columns = None if cache is None else Turn(cache, turn)",
            ]
        begun = len(draft.calls)
        draft.cache, indent = ("columns", "    ") if layer in looped else ("cache", "")
        made.append(block(draft, layer, one))
        draft.calls[begun:] = [indent + line for line in draft.calls[begun:]]
    return made


def logits(draft: Draft) -> Lines:
    """Generate the body of ``logits``, the head and what follows: x (..., C) -> float32 (..., V)."""
    form = draft.spec.loss.form
    check_known(form)
    product = "self.head(x)" if not draft.spec.tied else "self.embedding.as_linear(x)"
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


def products(draft: Draft) -> Iterator[str]:
    """Yield the code of modules that replace a linear layer's product and do not fold into its weight."""
    for leaf, node in draft.spec.linears:
        if hasattr(node.make(draft.spec.geometry), "folded"):
            continue
        draft.copier.take_part("ReplacedLinear")
        out, inputs = draft.plan.parameters[f"{leaf}.weight"].shape
        yield f"self{path_to(leaf)} = ReplacedLinear({inputs}, {out}, {draft.made(node)})"


def fields(draft: Draft) -> Iterator[str]:
    """Yield the code of the batch fields that parts read; refuse inputs unavailable in generation."""
    taps = {f"layers.{i}.{tap}" for i, b in enumerate(draft.spec.blocks) for tap in b.taps}
    taps |= {name for names in draft.handed_on for name in names}
    for name in draft.needed:
        known = (name in AT_HAND, name in draft.declared, name in draft.streams, name == "x0")
        if not any(known) and name not in taps and name not in draft.aliases:
            raise CannotWriteError(
                f"a part reads {name}, which is not there when a text is continued"
            )
    if "documents" in draft.needed:
        yield 'documents = ops.zeros((B, T), "int32")  # a row is one document'
    if "positions" in draft.needed:
        yield "positions_of_rows = ops.broadcast_to(positions, (B, T))"
    if wanted := [name for name in draft.needed if name in draft.declared]:
        yield 'every = ids if cache is None else cache.extend("ids", (ids,))[0]'
        yield "fields = batch_fields(ops.to_numpy(every))"
        for name in wanted:
            yield f'{variable(name)} = ops.from_numpy(fields["{name}"][:, start:])'
