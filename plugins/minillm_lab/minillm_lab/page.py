"""A self-contained HTML page: no scripts or external files, light and dark mode, readable on a phone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import Any

from minillm_core.commands import rounded
from minillm_core.studies import sized
from minillm_lab.figure import NARROW, WIDE, Size, colour
from minillm_lab.markup import Markup, joined, tag

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content security policy: load and run nothing, whatever the page contains."""


def document(title: str, *body: object) -> str:
    """Build a complete page.

    Args:
        title: also the heading.
        body: content below the heading.
    """
    style = resources.files("minillm_lab").joinpath("page.css").read_text(encoding="utf-8")
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} · minillm"),
        tag("style", Markup(style)),
    )
    main = tag("main", tag("h1", title), *body, tag("footer", f"Written by minillm, {made}."))
    return f"<!doctype html>\n{tag('html', head, tag('body', main), lang='en')}\n"


def section(heading: str, *body: object) -> Markup:
    """Build a section with a heading."""
    return tag("section", tag("h2", heading), *body)


def chart(heading: str, draw: Callable[[Size], Markup]) -> Markup:
    """Draw a figure at two sizes, so that its text stays readable on a phone."""
    return tag(
        "figure",
        tag("h3", heading),
        tag("div", draw(WIDE), class_="wide"),
        tag("div", draw(NARROW), class_="narrow"),
    )


def small(heading: str, drawn: Markup) -> Markup:
    """Frame a figure that is narrow enough for a phone."""
    return tag("figure", tag("h3", heading), drawn)


def legend(names: Iterable[tuple[str, int]]) -> Markup:
    """Build a legend of names and colours."""
    return tag(
        "ul",
        *(
            tag(
                "li",
                tag(
                    "svg",
                    tag("line", x1=1, x2=25, y1=5, y2=5, class_="line"),
                    viewBox="0 0 26 10",
                    aria_hidden="true",
                    class_=colour(number),
                ),
                name,
            )
            for name, number in names
        ),
        class_="legend",
    )


def table(head: Sequence[str], rows: Iterable[Iterable[object]]) -> Markup:
    """Build a table: the first cell of a row is its name; a heading with ``>`` marks a numeric column.

    On a phone the table scrolls sideways while the names stay in place.
    """
    kinds = ["number" if heading.startswith(">") else None for heading in head]
    cells = [
        tag("th", heading.lstrip(">"), scope="col", class_=kind)
        for heading, kind in zip(head, kinds, strict=True)
    ]
    lines = [_row(kinds, *row) for row in rows]
    whole = tag("table", tag("thead", tag("tr", *cells)), tag("tbody", *lines))
    return tag("div", whole, class_="scroll")


def sentence(*parts: str, joint: str = ", ") -> str:
    """Join parts into a sentence."""
    line = joint.join(parts)
    return f"{line[:1].upper()}{line[1:]}."


def facts(entries: Mapping[str, object]) -> Markup:
    """List facts, one per line, skipping empty ones."""
    lines = [
        joined(tag("dt", name), tag("dd", value))
        for name, value in entries.items()
        if value not in (None, "", ())
    ]
    return tag("dl", *lines)


def pairs(table: Mapping[str, Any]) -> str:
    """Format settings on one line, skipping None."""
    return ", ".join(f"{key} {_value(key, v)}" for key, v in table.items() if v is not None)


def _row(kinds: Sequence[str | None], name: object, *cells: object) -> Markup:
    others = zip(cells, kinds[1:], strict=True)
    return tag(
        "tr",
        tag("th", name, scope="row"),
        *(tag("td", cell, class_=kind) for cell, kind in others),
    )


def _value(key: str, value: Any) -> str:
    return sized(value) if key.endswith("_bytes") and isinstance(value, int) else shown(value)


def shown(value: Any) -> str:
    """Format a setting's value, close to its command-line form."""
    if isinstance(value, bool | list | dict | float):
        return rounded(json.dumps(value, ensure_ascii=False))
    return f"{value:,}" if isinstance(value, int) else str(value)
