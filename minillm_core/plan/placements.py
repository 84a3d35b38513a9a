"""What each plugin put where: every slot that is taken, by whom, with what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from minillm_core.nn.attention import AttentionSpec
from minillm_core.nn.block import BlockSpec, Nothing
from minillm_core.nn.decoder import DecoderSpec
from minillm_core.nn.node import Node
from minillm_core.nn.residual import SiteSpec
from minillm_core.nn.value import Setting
from minillm_core.plan.words import function_words, words
from minillm_core.plugins.builders import OptimizerSlots
from minillm_core.plugins.builders.data import Field

__all__ = [
    "Placement",
    "field_placements",
    "init_placements",
    "model_placements",
    "node_placements",
    "optimizer_placements",
]


@dataclass(frozen=True, order=True)
class Placement:
    """A slot that a plugin took."""

    owner: str
    slot: str  # as in the design: layers.3.attention.layout, opt.rule[muon].scale
    what: str  # class, function or number
    settled: bool = False  # nothing runs for it: true by construction, once planned
    shapes: bool = True  # the model's function differs by it


def model_placements(spec: DecoderSpec) -> Iterator[Placement]:
    """Of the model and the loss, initial values apart."""
    for index, block in enumerate(spec.blocks):
        yield from _block(f"layers.{index}", index, block)
    yield from node_placements((*spec.embed, *spec.streams, *(node for _, node in spec.linears)))
    yield from _whole("model.norm[final]", spec.final_norm)
    if spec.final is not None:
        yield from _site(spec.final)
    loss = spec.loss
    for name, owner in loss.form_owners:
        judged = name in loss.form.evaluated().named
        what = words(getattr(loss.form, name))
        yield Placement(owner, f"loss.logits[{name}]", what, True, judged)
    for target in loss.targets:
        what = f"weight {words(target.weight)}"
        yield Placement(target.owner, f"loss.target[{target.key}]", what, True, False)
    for term in loss.terms:
        source = term.emitted if term.node is None else words(term.node)
        what = f"{source}, weight {words(term.weight)}"
        yield Placement(term.owner, f"loss.term[{term.key}]", what, False, False)


def node_placements(nodes: Iterable[Node]) -> Iterator[Placement]:
    """Of nodes that stand for themselves."""
    for node in nodes:
        yield Placement(node.owner, node.slot, words(node))


def optimizer_placements(slots: OptimizerSlots) -> Iterator[Placement]:
    """Of rules that parameters follow, assignments and multipliers."""
    followed = {claim.resolve() for claim in slots.assigned.values()} | {"adamw"}
    for name in sorted(followed):
        for anchor, owner, stage in slots.rule(name).stages:
            if owner != "core":
                yield Placement(owner, f"opt.rule[{name}].{anchor}", words(stage), shapes=False)
    assigned = [
        (claim.owner, f"opt.assign[{claim.resolve()}]") for claim in slots.assigned.values()
    ]
    given = [(c.owner, f"opt.set[{field}]") for (_, field), c in slots.multipliers.items()]
    for owner, slot in sorted({*assigned, *given}):
        count = (assigned + given).count((owner, slot))
        what = "1 parameter" if count == 1 else f"{count} parameters"
        yield Placement(owner, slot, what, settled=True, shapes=False)


def init_placements(inits: Mapping[str, tuple[str, Any]]) -> Iterator[Placement]:
    """Of claimed initial values: parameter -> (owner, initialiser)."""
    for name, (owner, init) in inits.items():
        yield Placement(owner, f"model.init[{name}]", words(init), shapes=False)


def field_placements(fields: Iterable[tuple[str, str, Field]]) -> Iterator[Placement]:
    """Of further fields of the batch."""
    for name, owner, field in fields:
        shape = "".join(f", {n}" for n in field.shape)
        what = f"{field.dtype} (rows, T{shape})"
        yield Placement(owner, f"data.field[{name}]", what, settled=True, shapes=False)


def _block(at: str, index: int, block: BlockSpec) -> Iterator[Placement]:
    if isinstance(block.attention, AttentionSpec):
        yield from _attention(f"{at}.attention", block.attention)
    else:
        yield from _whole(f"model.attention[{index}]", block.attention)
    yield from _whole(f"model.mlp[{index}]", block.mlp)
    yield from _whole(f"model.norm[{at}.attention]", block.attention_norm)
    yield from _whole(f"model.norm[{at}.mlp]", block.mlp_norm)
    for site in block.sites():
        yield from _site(site)


def _attention(at: str, attention: AttentionSpec) -> Iterator[Placement]:
    yield from node_placements(attention.nodes())
    for slot in ("window", "scale"):
        setting = getattr(attention, slot)
        if setting is not None:
            yield Placement(setting.owner, f"{at}.{slot}", words(setting), settled=True)
    if attention.documents is not None:
        apart = attention.documents
        yield Placement(apart.owner, f"{at}.documents", words(apart), settled=True)
    for slot in ("frequencies", "scaling"):
        claimed = getattr(attention.rope, slot)
        if claimed is not None:
            yield Placement(claimed[0], f"{at}.rope.{slot}", function_words(claimed), True)


def _whole(slot: str, claimed: Node | Nothing | None) -> Iterator[Placement]:
    if isinstance(claimed, Nothing):
        yield Placement(claimed.owner, slot, "none", settled=True)
    elif claimed is not None:
        yield Placement(claimed.owner, slot, words(claimed))


def _site(site: SiteSpec) -> Iterator[Placement]:
    for source, owner, coefficient in site.terms:
        slot = f"model.residual[{site.name}][{source}]"
        yield Placement(owner, slot, words(coefficient), isinstance(coefficient, Setting))
