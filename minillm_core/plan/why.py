"""Queries on the slot table for ``minillm plugins why``: by name, and for refused plans."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minillm_core.errors import PlanError
from minillm_core.plan.plan import Plan
from minillm_core.plan.slots import CORE, LAYER, Refused, SlotReport, SlotState, fold, located


def slot_reports(
    state: SlotState,
    plan: Plan | None = None,
    refusal: PlanError | None = None,
    plugins: Collection[str] = (),
) -> tuple[SlotReport, ...]:
    """Return the reports of every slot, parameter and rule, without kernels.

    Args:
        state: the slots as filled while planning.
        plan: the resulting plan; None: planning was refused, and only slots whose hooks were called for
            all plugins are reported, together with the slots of the conflict.
        refusal: the error that refused the plan.
        plugins: the names of all plugins.
    """
    if plan is not None:
        return tuple(report for report in plan.table if report.kind != "query")
    certain, open_ = [], []
    for hooks, reports in state.parts():
        (certain if hooks <= state.called else open_).extend(reports)
    if refusal is None or any(one.clashes and _names(refusal, one.slot) for one in certain):
        return tuple(certain)
    known = (*certain, *open_)
    concerned = _concerned(refusal, known)
    owners = {h.owner for one in known if one.slot in concerned for h in one.held} - {CORE}
    who = tuple(sorted({*plugins} & {*(refusal.plugins or owners)}))
    clash = Refused(who, refusal.what, refusal.fix)
    whole = {one.slot for one in certain}
    return tuple(
        replace(one, refused=(*one.refused, clash)) if one.slot in concerned else one
        for one in known
        if one.slot in whole or one.slot in concerned
    )


def _names(refusal: PlanError, slot: str) -> bool:
    """Return whether a conflict names a slot, or the chain, site or attention around it."""
    named = refusal.slots or (refusal.where or "?",)
    return any(slot == name or slot.startswith((f"{name}.", f"{name}[")) for name in named)


def _concerned(refusal: PlanError, reports: Iterable[SlotReport]) -> Collection[str]:
    """Return the slots of a refusal: the slots it names, the slot at its place, or the slots within."""
    slots, where = [one.slot for one in reports], refusal.where or "?"
    named = [s for s in slots if any(n == s or n.startswith(f"{s}[") for n in refusal.slots)]
    at = [slot for slot in slots if slot == where]
    return named or at or [slot for slot in slots if slot.startswith((f"{where}.", f"{where}["))]


@dataclass(frozen=True)
class SlotGroup:
    """A report that applies to several layers."""

    slot: str  # with * for the layer index
    layers: tuple[int, ...]  # empty: it belongs to no layer
    report: SlotReport

    @property
    def where(self) -> str:
        """``layers 0-3``, or an empty string."""
        return located(self.layers)

    def data(self) -> dict[str, Any]:
        """Return the group as JSON."""
        return self.report.data() | {"slot": self.slot, "layers": list(self.layers)}


def grouped(reports: Iterable[SlotReport]) -> list[SlotGroup]:
    """Return the reports, with equal reports of several layers merged."""
    first: dict[tuple[str, str], SlotReport] = {}
    entries = []
    for report in reports:
        alike = _alike((report.kind, report.held, report.refused), report.slot)
        first.setdefault((LAYER.sub("*", report.slot, count=1), alike), report)
        entries.append((report.slot, alike))
    return [SlotGroup(slot, layers, first[slot, alike]) for slot, alike, layers in fold(entries)]


def _alike(texts: Any, slot: str) -> str:
    """Return the texts without the slot's layer index."""
    found = LAYER.search(slot)
    layer = found[0] if found else "none"
    return re.sub(rf"(layers\.|layer |attention\[|mlp\[){layer}\b", r"\1*", repr(texts))


def names_of(report: SlotReport) -> Iterator[str]:
    """Yield every name that matches a report.

    The name itself, the name without its layer (as ``minillm plan`` shows it), with ``attn`` for the
    attention of every layer, and the site that it concerns.
    """
    for name in (report.slot, *report.also):
        yield name
        bare = re.sub(r"layers\.\d+\.", "", name, count=1)
        if bare != name:
            yield bare
        if report.kind != "parameter" and bare.startswith("attention."):
            yield f"attn.{bare.removeprefix('attention.')}"


def matches(text: str, report: SlotReport) -> bool:
    """Return whether a name of the report is ``text``, or begins with it up to a ``.`` or ``[``.

    Args:
        text: ``attn.qk``, ``layers.2.*``, ``model.mlp[3]``, ``head.weight``; ``*`` is any text.
        report: a report of the plan.
    """
    asked = re.sub(r"^optimizer\b", "opt", text.strip().rstrip("."))  # as plugins write it
    inner = ".*".join(re.escape(part) for part in asked.split("*"))
    return any(re.match(rf"{inner}($|[.\[])", name) for name in names_of(report))


def nearest_names(text: str, reports: Sequence[SlotReport]) -> list[str]:
    """Return the names, or beginnings of names, nearest to the text; three at most."""
    known: set[str] = set()
    for report in reports:
        for name in names_of(report):
            parts = re.split(r"(?=[.\[])(?![^\[]*\])", name)  # not within brackets
            known.update("".join(parts[:end]) for end in range(1, len(parts) + 1))
    return difflib.get_close_matches(text, sorted(known), n=3, cutoff=0.6)
