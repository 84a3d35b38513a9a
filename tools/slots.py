"""The builders from an author's view: the slots of each, and one table of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from minillm_core.config.load import load
from minillm_core.plan.slots import SlotState
from minillm_core.plugins.builders import (
    AttentionBuilder,
    DataBuilder,
    KernelBuilder,
    LossBuilder,
    ModelBuilder,
    OptimizerBuilder,
)
from minillm_core.plugins.builders.attention import QK, Out, RopeClaims
from minillm_core.plugins.builders.model import Embed
from minillm_core.plugins.slots import Chain, slots_in
from tools.markdown import called, entry, link, table
from tools.reading import doc_of

__all__ = ["BUILDERS", "Slot", "builder_section", "slots"]

BUILDERS: Mapping[str, tuple[type, str, Mapping[str, type]]] = {
    "build_attention": (AttentionBuilder, "attn", {"qk": QK, "rope": RopeClaims, "out": Out}),
    "build_model": (ModelBuilder, "model", {"embed": Embed}),
    "compute_loss": (LossBuilder, "loss", {}),
    "optimizer_factory": (OptimizerBuilder, "optimizer", {}),
    "kernel_provider": (KernelBuilder, "kernels", {}),
    "build_data": (DataBuilder, "data", {}),
}
"""Hook -> its builder, the builder's usual variable name, and its namespaces."""

_KIND = re.compile(r"(Claim|Chain|Term|Query)( per [^:]+)?: ")


@dataclass(frozen=True)
class Slot:
    """A slot as written by an author, and its implementation, whose docstring's first line is the description."""

    path: str  # attn.window; of a chain: attn.qk
    target: Any  # a function; of a chain: the class that declares its anchors

    @property
    def anchors(self) -> tuple[str, ...]:
        """The anchors of a chain, in order."""
        return _anchors().get(self.path, ())

    @property
    def heading(self) -> str:
        """The slot's call as a heading."""
        if self.anchors:
            return ", ".join(
                (f"{self.path}.{self.anchors[0]}", *(f".{a}" for a in self.anchors[1:]))
            )
        return called(self.path, self.target)

    @property
    def parts(self) -> tuple[str, str, str]:
        """Its kind, the inputs of a node, and the output of the node or the purpose of the slot."""
        summary = doc_of(self.target).summary
        match = _KIND.match(summary)
        kind = (match[1].lower() + (match[2] or "")) if match else ""
        given, arrow, gives = summary[match.end() if match else 0 :].rstrip(".").partition(" -> ")
        return (kind, given, gives) if arrow else (kind, "", given)

    @property
    def row(self) -> tuple[str, str, str, str]:
        """Its row in the table."""
        shown = f"{self.path}.{self.anchors[0]}" if self.anchors else self.path
        others = "".join(f" `.{anchor}`" for anchor in self.anchors[1:])
        return link(shown, self.heading) + others, *self.parts

    @property
    def entry(self) -> str:
        """Its full documentation."""
        kind, given, gives = self.parts
        stated = f"{given} → {gives}" if given else gives
        if kind:
            stated = f"*{kind.capitalize()}*: {stated}"
        stated = stated.replace(" -> ", " → ") + "."
        if not self.anchors:
            return entry(self.heading, self.target, stated)
        doc = doc_of(self.target)  # its arguments are those of the chain's anchors
        example = f"```python\n{doc.example}\n```"
        return "\n\n".join((f"### `{self.heading}`", stated, *doc.body, example))


@cache
def _anchors() -> Mapping[str, tuple[str, ...]]:
    """Map each chain, as written by authors, to its anchors in the slot table."""
    config = load(preset="tiny", default_preset=lambda: ("tiny", "the page")).config
    state = SlotState.of(config)
    declared = (*slots_in(state.attention[0]), *slots_in(state.model))
    chains = [one for one in declared if isinstance(one, Chain)]
    return {one.where.replace("layers.0.attention", "attn"): one.anchors for one in chains}


def slots(hook: str) -> list[Slot]:
    """List the slots of a hook's builder, in source order."""
    builder, name, namespaces = BUILDERS[hook]
    found = []
    for path, space in namespaces.items():
        chain = Slot(f"{name}.{path}", space)
        found += [chain] if chain.anchors else _offered(chain.path, space)
    return found + _offered(name, builder)


def _offered(path: str, cls: type) -> list[Slot]:
    public = {key: value for key, value in vars(cls).items() if not key.startswith("_")}
    return [Slot(f"{path}.{key}", value) for key, value in public.items() if callable(value)]


def builder_section(hook: str) -> str:
    """Document a builder: its attributes, a table of its slots, and each slot."""
    builder, name, _ = BUILDERS[hook]
    doc, offered = doc_of(builder), slots(hook)
    known = [(f"`{name}.{key}`", text) for key, text in doc.sections.get("Attributes", [])]
    return "\n\n".join(
        [
            doc.summary,
            *([table(("attribute", "meaning"), known)] if known else []),
            table(("slot", "kind", "receives", "returns"), [slot.row for slot in offered]),
            *(slot.entry for slot in offered),
        ]
    )
