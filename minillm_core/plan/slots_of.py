"""The slots that plugins take, layers that are alike folded: a line each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minillm_core.plan.fold import fold, ranges
from minillm_core.text import plain

if TYPE_CHECKING:
    from minillm_core.plan.plan import Plan

__all__ = ["Taken", "slots_of", "taken"]

RULE = "opt.rule["


@dataclass(frozen=True)
class Taken:
    """A slot that a plugin took, in one or several layers; safe to print."""

    owner: str
    slot: str  # attention.layout, model.residual[in][x0], opt.assign[muon]
    where: str  # "layers 0-3", "layer 2", or "" outside the layers
    what: str

    def __str__(self) -> str:
        place = f", {self.where}" if self.where else ""
        return f"{self.slot}{place}: {self.what}"


def taken(plan: Plan) -> tuple[Taken, ...]:
    """Every slot of the plan that is not the core's, by plugin."""
    entries = [
        *((p.slot, (p.owner, p.what)) for p in plan.placements if not p.slot.startswith(RULE)),
        *_rules(plan),
    ]
    entries.sort(key=lambda entry: entry[1][0])
    found = []
    for pattern, (owner, what), layers in fold(entries):
        slot = pattern.replace("layers.*.", "").replace("[*]", "")
        where = f"layer{'s' if len(layers) > 1 else ''} {ranges(layers)}" if layers else ""
        found.append(Taken(plain(owner), plain(slot), where, plain(what)))
    return tuple(found)


def _rules(plan: Plan) -> Iterator[tuple[str, tuple[str, str]]]:
    """Stages of a rule that one plugin provides, in the order in which they run, as one entry."""
    for name, rule in sorted(plan.rules.items()):
        held: dict[str, list[tuple[str, str]]] = {}
        for anchor, owner, stage in rule.stages:
            held.setdefault(owner, []).append((anchor, stage.reference.rpartition(":")[2]))
        for owner, stages in held.items():
            if owner != "core":
                anchor = f".{stages[0][0]}" if len(stages) == 1 else ""
                yield f"{RULE}{name}]{anchor}", (owner, ", ".join(what for _, what in stages))


def slots_of(plan: Plan, plugin: str) -> tuple[str, ...]:
    """The slots that one plugin takes, as ``minillm plugins info`` lists them."""
    return tuple(str(entry) for entry in taken(plan) if entry.owner == plugin)
