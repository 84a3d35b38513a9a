"""What is known of one slot: who holds it and why, who was refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from minillm_core.plan.fold import LAYER, fold, ranges

__all__ = ["CORE", "Answer", "Folded", "Held", "Refused", "folded", "names_of"]

CORE = "core"


@dataclass(frozen=True)
class Held:
    """One thing that stands in a slot."""

    owner: str  # core, or a plugin
    what: str  # a class, a function, a number, or what the core does there
    why: str


@dataclass(frozen=True)
class Refused:
    """What is not let in."""

    who: tuple[str, ...]  # the contenders, sorted; who closed it; or the candidate
    what: str
    fix: str | None = None
    how: str = "clash"  # the plan is refused for it; else "closed", "cannot serve", "passed over"


@dataclass(frozen=True)
class Answer:
    """A slot, a parameter or an op."""

    slot: str  # layers.0.attention.qk.norm, model.residual[final][x0], kernel[attention]
    kind: str  # claim, chain, term, query, parameter
    held: tuple[Held, ...]  # in the order in which they run
    refused: tuple[Refused, ...] = ()
    also: tuple[str, ...] = ()  # further names that ask for it
    usual: bool = False  # as it is for every parameter of which nobody says anything

    @property
    def clashes(self) -> tuple[Refused, ...]:
        """What the plan is refused for."""
        return tuple(one for one in self.refused if one.how == "clash")


@dataclass(frozen=True)
class Folded:
    """An answer that holds in several layers."""

    slot: str  # * in the place of the layer
    layers: tuple[int, ...]  # none: it belongs to no layer
    answer: Answer

    @property
    def where(self) -> str:
        """``layers 0-3``, or nothing."""
        if not self.layers:
            return ""
        return f"layer{'s' if len(self.layers) > 1 else ''} {ranges(self.layers)}"

    def data(self) -> dict[str, Any]:
        """As JSON."""
        facts = asdict(self.answer)
        del facts["also"]
        return facts | {"slot": self.slot, "layers": list(self.layers)}


def folded(answers: Iterable[Answer]) -> list[Folded]:
    """Answers, those that are alike in several layers once."""
    first: dict[tuple[str, str], Answer] = {}
    entries = []
    for answer in answers:
        alike = _alike((answer.kind, answer.held, answer.refused), answer.slot)
        first.setdefault((LAYER.sub("*", answer.slot, count=1), alike), answer)
        entries.append((answer.slot, alike))
    return [Folded(slot, layers, first[slot, alike]) for slot, alike, layers in fold(entries)]


def _alike(texts: Any, slot: str) -> str:
    """The texts, without the number of the slot's layer."""
    found = LAYER.search(slot)
    layer = found[0] if found else "none"
    return re.sub(rf"(layers\.|layer |attention\[|mlp\[){layer}\b", r"\1*", repr(texts))


def names_of(answer: Answer) -> Iterator[str]:
    """Everything by which an answer can be asked for.

    The name itself, without its layer (as ``minillm plan`` shows it), ``attn`` for the attention
    of every layer, and the site that it is about.
    """
    for name in (answer.slot, *answer.also):
        yield name
        bare = re.sub(r"layers\.\d+\.", "", name, count=1)
        if bare != name:
            yield bare
        if answer.kind != "parameter" and bare.startswith("attention."):
            yield f"attn.{bare.removeprefix('attention.')}"
