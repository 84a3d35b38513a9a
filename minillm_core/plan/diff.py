"""The differences between two plans: for ``minillm plan --diff``, and in words for a resumed run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from minillm_core.plan.plan import Plan
from minillm_core.plan.render import amount, columns, sized
from minillm_core.plan.slots import filled_slots, fold, ranges
from minillm_core.text import counted, plain, rounded

ABSENT = "(none)"
"""Marks a value that one of two plans lacks."""

Pair = tuple[Any, ...]
"""The values in the first and the second plan."""


def difference(first: Plan, second: Plan) -> dict[str, Any]:
    """Compare two plans side by side, as pairs (first, second); JSON by ``as_json``.

    Returns:
        plan_hash; plugins: their names; slots: per plan the slots taken only there; export; totals:
        parameters, FLOP/token, bytes. Differing entries only, by name: parts of the model (parameters,
        FLOPs per token), memory, rules (arrays, parameters), schedules as JSON, and data: path -> the
        values in the two plans' data.
    """
    plans = (first, second)
    costs = [plan.estimate() for plan in plans]
    slots = [filled_slots(plan) for plan in plans]
    parts = [{p.name: (p.parameters, p.flops) for p in cost.parts} for cost in costs]
    rules = [{r.name: (r.arrays, r.parameters) for r in cost.rules} for cost in costs]
    held = [{n: s.data() for n, (_, s) in plan.schedules.items()} for plan in plans]
    return {
        "plan_hash": (first.hash, second.hash),
        "plugins": tuple(tuple(p.name for p in plan.plugins) for plan in plans),
        "slots": tuple(tuple(s for s in slots[i] if s not in slots[1 - i]) for i in (0, 1)),
        "export": (first.export.layout, second.export.layout),
        "parts": _unlike(*parts, missing=(0, 0)),
        "totals": {
            "parameters": tuple(cost.parameters for cost in costs),
            "FLOP/token": tuple(cost.flops_per_token for cost in costs),
            f"bytes in {costs[0].dtype}": tuple(cost.bytes for cost in costs),
        },
        "memory": _unlike(*(cost.memory for cost in costs), missing=0),
        "rules": _unlike(*rules, missing=(0, 0)),
        "schedules": _unlike(*held, missing=None),
        "data": differences(first.data(), second.data()),
    }


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Pair]:
    """Return path -> the two values, for each path where two plans' :meth:`Plan.data` differ.

    Parameter groups are compared parameter by parameter; a missing value is ABSENT.
    """
    return dict(_compare("", _by_parameter(first), _by_parameter(second)))


def in_words(found: Mapping[str, Pair]) -> tuple[str, ...]:
    """Return a line per difference, equal layers merged: ``train.steps: 360 -> 720``."""
    lines = []
    folded = fold((path, _shown(*pair)) for path, pair in found.items())
    for pattern, (old, new), layers in folded:
        place = plain(pattern.replace("*", ranges(layers) if layers else "*", 1))
        lines.append(f"{place}: {old} -> {new}")
    return tuple(lines)


def render_diff(first: Plan, second: Plan, console: Console, typed: Sequence[str]) -> None:
    """Print the differences between two plans, in columns headed by the text typed for each."""
    found = difference(first, second)
    if first.hash == second.hash:
        console.print(Text(f"the same plan: {first.hash[:12]}"))
        return
    console.print(_figures(found, typed))
    if any(found["slots"]):
        table = columns("", "plugin", "slot", "where", "what")
        for sign, slots in zip("-+", found["slots"], strict=True):
            for slot in slots:
                _row(table, sign, slot.owner, slot.slot, slot.where, rounded(slot.what))
        console.print()
        console.print(table)
    if rest := _rest(found):
        console.print()
        console.print(Text("\n".join(rest)))


def _figures(found: Mapping[str, Any], typed: Sequence[str]) -> Table:
    table = columns(
        "", *(f">{plain(names.replace(',', ', ')) or 'as it is'}" for names in typed), ">"
    )
    _row(table, "plan", *(key[:12] for key in found["plan_hash"]), "")
    for name, pair in found["totals"].items():
        show = sized if name.startswith("bytes") else amount
        _row(table, name, *map(show, pair), _change(*pair))
    for name, pair in found["memory"].items():
        _row(table, f"  {plain(name)}", *map(sized, pair), _change(*pair))
    for name, (old, new) in found["parts"].items():
        for kind, *pair in zip(("parameters", "FLOP/token"), old, new, strict=True):
            if pair[0] != pair[1]:
                _row(table, f"  {plain(name)}, {kind}", *map(amount, pair), _change(*pair))
    for name, pair in found["rules"].items():
        counts = (counted(arrays, "array") if arrays else "" for arrays, _ in pair)
        _row(table, f"rule {plain(name)}", *counts, "")
    if found["export"][0] != found["export"][1]:
        _row(table, "export", *(layout or "none" for layout in found["export"]), "")
    return table


def _rest(found: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the differences that no table shows: settings, schedules, options."""
    said = ("model.spec", "model.parameters", "model.inits", "optimizer", "versions", "digests")
    rest = {
        path: pair
        for path, pair in found["data"].items()
        if not path.startswith(said) and any(value and value != ABSENT for value in pair)
    }
    return in_words(rest)


def _row(table: Table, *cells: str) -> None:
    table.add_row(*(Text(cell) for cell in cells))


def _change(old: float, new: float) -> str:
    return f"{new / old - 1:+.1%}" if old and new != old else "" if old == new else "new"


def _shown(*pair: Any) -> tuple[str, ...]:
    """Return both values as text, with all digits if they would otherwise look equal."""
    exact = [value if value is ABSENT else json.dumps(value) for value in pair]
    shown = [plain(rounded(text), 60) for text in exact]
    return tuple(shown if shown[0] != shown[1] else (plain(text, 60) for text in exact))


def _unlike(first: Mapping[str, Any], second: Mapping[str, Any], missing: Any) -> dict[str, Pair]:
    pairs = {
        name: (first.get(name, missing), second.get(name, missing)) for name in {**first, **second}
    }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _compare(path: str, old: Any, new: Any) -> Iterator[tuple[str, Pair]]:
    """Yield (dotted path, the two values), as deep as both sides are nested."""
    lists = isinstance(old, (list, tuple)) and isinstance(new, (list, tuple))
    if lists and len(old) == len(new):
        old, new = ({str(i): item for i, item in enumerate(side)} for side in (old, new))
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in {**old, **new}:
            below = f"{path}.{key}" if path else key
            yield from _compare(below, old.get(key, ABSENT), new.get(key, ABSENT))
    elif old != new:
        yield path, (old, new)


def _by_parameter(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameter groups of a plan's data as parameter -> rule and factors."""
    optimizer = dict(data["optimizer"])
    members = {
        member["name"]: {"rule": group["rule"], **{k: v for k, v in member.items() if k != "name"}}
        for group in optimizer.pop("groups", ())
        for member in group["members"]
    }
    return {**data, "optimizer": {**optimizer, "parameters": members}}
