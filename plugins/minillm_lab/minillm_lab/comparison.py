"""The HTML page comparing several runs: held-out losses, and the settings that differ."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from minillm_core.studies import amount
from minillm_lab import page
from minillm_lab.figure import SECONDS, TOKENS, Axis, Line, Size, line_chart
from minillm_lab.history import History
from minillm_lab.markup import Markup, tag

Json = Mapping[str, Any]

RATE, LOSS = Axis("held-out bits a byte"), Axis("held-out loss, nats a token")


def comparison_page(histories: Sequence[History]) -> str:
    """Render the comparison page of two or more runs.

    Losses of different tokenizers are not comparable, so bits per byte are plotted where all runs
    have them.
    """
    names = _names(histories)
    rated = all(history.series("bits_per_byte", "step", evaluations=True) for history in histories)
    key, axis = ("bits_per_byte", RATE) if rated else ("val_loss", LOSS)

    def drawn(x: str, of_x: Axis) -> Callable[[Size], Markup]:
        lines = [
            Line(name, colour, history.series(key, x, evaluations=True), dots=True)
            for colour, (name, history) in enumerate(zip(names, histories, strict=True), 1)
        ]
        return lambda size: line_chart(lines, of_x, axis, size)

    return page.document(
        f"{len(histories)} runs",
        *(tag("p", warning, class_="warn") for warning in _warnings(histories, rated=rated)),
        page.section(
            "Held-out text",
            page.legend((name, colour) for colour, name in enumerate(names, 1)),
            tag(
                "div",
                page.chart("Against tokens", drawn("tokens", TOKENS)),
                page.chart("Against time", drawn("seconds", SECONDS)),
                class_="charts",
            ),
        ),
        page.section("Figures", _figures(names, histories)),
        page.section("What differs", _differences(names, histories)),
    )


def _warnings(histories: Sequence[History], *, rated: bool) -> Iterator[str]:
    """Say why figures on held-out text are not comparable."""
    if not _same_text([history.record for history in histories]):
        yield "The runs have other data: their figures on held-out text are not comparable."
    if not rated and len({page.shown(one.record.get("tokenizer")) for one in histories}) > 1:
        yield (
            "The runs have other tokenizers, and not all of them have bits a byte: their losses a token "
            "are not comparable."
        )


def _same_text(records: Sequence[Json]) -> bool:
    """Return whether all runs read the same text, in one order and with one part held out."""
    same, left = [records[0]], [*records[1:]]
    while more := [one for one in left if any(_match(one, other) for other in same)]:
        same += more
        left = [one for one in left if one not in more]
    return not left


def _match(one: Json, other: Json) -> bool:
    """Compare the data of two runs.

    A fingerprint is of ids, order and split. Where tokenizers differ, or plugins that arrange the documents, the
    runs are compared by where the text is from, how much it is and how it is split.
    """
    prints = [(record.get("data") or {}).get("fingerprint") for record in (one, other)]
    if prints[0] == prints[1] is not None:
        return True
    alike = one.get("tokenizer") == other.get("tokenizer") and _arranged(one) == _arranged(other)
    if alike and None not in prints:
        return False
    return _origin(one) == _origin(other)


def _arranged(record: Json) -> dict[str, Any]:
    """Return the plugins that arrange the documents of a run."""
    data = record["plan"].get("data") or {}
    return {key: data[key] for key in ("order", "packer", "windows") if key in data}


def _origin(record: Json) -> list[Any]:
    """Return where a run's text is from, its number of documents, and how it is split and ordered."""
    description = str((record.get("data") or {}).get("description"))
    settings = record["config"].get("data") or {}
    return [re.sub(r"[\d,]+ tokens", "", description), *map(settings.get, ("val", "seed", "block"))]


def _names(histories: Sequence[History]) -> list[str]:
    """Name the runs after their folders; by the paths where two have the same name."""
    names = [history.out.resolve().name for history in histories]
    return names if len({*names}) == len(names) else [str(history.out) for history in histories]


def _figures(names: Sequence[str], histories: Sequence[History]) -> Markup:
    head = ["run", ">parameters", ">tokens", ">training, seconds", ">tokens/s", ">held-out loss"]
    rows = []
    for name, history in zip(names, histories, strict=True):
        planned = history.record["plan"]["model"]["parameters"].values()
        last = history.steps[-1] if history.steps else None
        loss = history.series("val_loss", "step", evaluations=True)
        rate = history.series("bits_per_byte", "step", evaluations=True)
        rows.append(
            (
                name,
                f"{sum(math.prod(one['shape']) for one in planned):,}",
                amount(last.tokens) if last else "",
                f"{last.seconds:,.0f}" if last else "",
                f"{last.tokens / last.seconds:,.0f}" if last and last.seconds else "",
                f"{loss[-1][1]:.4f}" if loss else "none yet",
                f"{rate[-1][1]:.4f}" if rate else "unknown",
            )
        )
    return page.table([*head, ">bits a byte"], rows)


def _differences(names: Sequence[str], histories: Sequence[History]) -> Markup:
    """Tabulate the settings that are not equal in all runs."""
    settings = [dict(_settings(history.record)) for history in histories]
    keys = dict.fromkeys(key for one in settings for key in one)
    rows = [
        (key, *(one.get(key, "") for one in settings))
        for key in keys
        if len({one.get(key, "") for one in settings}) > 1
    ]
    if not rows:
        return tag("p", "No setting differs.", class_="soft")
    return page.table(["setting", *names], rows)


def _settings(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List (``train.lr``, its value as text), plugins and their options included."""
    found = [
        (f"{part}.{key}", page.shown(entry["value"]))
        for part, table in record["config"].items()
        if isinstance(table, Mapping) and part != "plugins"
        for key, entry in table.items()
        if isinstance(entry, Mapping) and "value" in entry
    ]
    found += [("seed", page.shown(record.get("seed")))]
    found += [
        (f"plugin {one['name']}", page.pairs(one.get("options") or {}) or "as it is")
        for one in record.get("plugins") or ()
    ]
    return found
