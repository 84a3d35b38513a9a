"""What a run's record says of its plan and its plugins, as tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from minillm_core.measure import page
from minillm_core.measure.markup import Markup, joined, tag

__all__ = ["plan", "plugins"]

Json = Mapping[str, Any]


def plugins(record: Json) -> Markup | None:
    """Who took part, and what shows it."""
    rows = [_plugin(one) for one in record.get("plugins") or ()]
    if not rows:
        return None
    return page.section(
        "Plugins",
        tag("p", "Evidence is what a plugin left behind while the run went on.", class_="soft"),
        page.table(["plugin", "from", "options", "evidence"], rows),
    )


def _plugin(one: Json) -> Iterator[object]:
    yield one["name"]
    version = one.get("version")
    source = f"{one['distribution']} {version}" if one.get("distribution") else "a file"
    yield tag("span", source, class_="one")
    yield tag("div", page.pairs(one.get("options") or {}) or "none", class_="long")
    evidence = one.get("evidence")
    if evidence is None:
        yield "none yet: it is looked for when the run ends"
        return
    found = [*evidence.get("what", ()), *(f"missing: {key}" for key in evidence.get("missing", ()))]
    if "switched_off" in evidence:
        found.append(f"switched off: {evidence['switched_off']}")
    if not evidence.get("shown"):
        yield joined(tag("span", "nothing shows that it took part", class_="worse"), _lines(found))
        return
    yield tag("details", tag("summary", "it took part"), _lines(found))


def _lines(keys: list[str]) -> Markup:
    return joined(*(tag("small", key, class_="wrap") for key in keys))


def plan(record: Json) -> Markup:
    """Parameters by role, update rules, scheduled values."""
    planned = record["plan"]
    parameters = list(planned["model"]["parameters"].values())
    total = sum(_size(one) for one in parameters) or 1
    roles: dict[tuple[str, str], list[Json]] = {}
    for one in parameters:
        roles.setdefault((one["role"], one["owner"]), []).append(one)
    rows: list[tuple[object, ...]] = [
        (
            role,
            owner,
            f"{len(some)}",
            tag("span", ", ".join(dict.fromkeys(map(_shape, some))), class_="one"),
            f"{(count := sum(map(_size, some))):,}",
            f"{count / total:.1%}",
        )
        for (role, owner), some in roles.items()
    ]
    rows.append(("all", "", f"{len(parameters)}", "", f"{total:,}", "100 %"))
    rules = [
        (name, rule["owner"], ", ".join(_stage(stage) for stage in rule["stages"]))
        for name, rule in planned["optimizer"]["rules"].items()
    ]
    return page.section(
        "Plan",
        tag("p", f"Hash {record['plan_hash'][:12]}.", class_="soft"),
        page.table(["parameters", "owner", ">arrays", "shape", ">number", ">share"], rows),
        page.table(["update rule", "owner", "stages"], rules),
        page.table(["scheduled value", "owner", "course"], _schedules(planned)),
    )


def _stage(stage: Json) -> str:
    return stage["anchor"] + ("" if stage["owner"] == "core" else f" ({stage['owner']})")


def _schedules(planned: Json) -> Iterator[tuple[str, str, str]]:
    for name, entry in planned["schedules"]["values"].items():
        yield name, entry["owner"], page.pairs({k: v for k, v in entry.items() if k != "owner"})


def _shape(parameter: Json) -> str:
    return " × ".join(f"{length:,}" for length in parameter["shape"]) or "1"


def _size(parameter: Json) -> int:
    return math.prod(parameter["shape"])
