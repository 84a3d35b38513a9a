"""The HTML page comparing several runs: held-out losses, and the settings that differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minillm_core.studies import amount
from minillm_lab import page
from minillm_lab.figure import SECONDS, TOKENS, Axis, Line, Size, line_chart
from minillm_lab.history import History
from minillm_lab.markup import Markup, tag

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

    texts = {str((history.record.get("data") or {}).get("description")) for history in histories}
    warning = "The runs have other data: their figures on held-out text are not comparable."
    return page.document(
        f"{len(histories)} runs",
        tag("p", warning, class_="warn") if len(texts) > 1 else None,
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
