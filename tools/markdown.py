"""Markdown parts of a reference page: tables, and entries of functions and classes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from tools.reading import arguments, doc_of, members

__all__ = ["called", "entry", "fields", "link", "table"]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Format a table, omitting empty columns."""
    head, rows = list(head), [[cell.strip() for cell in row] for row in rows]
    kept = [i for i in range(len(head)) if any(row[i] for row in rows)]
    lines = [head, ["---"] * len(head), *rows]
    cells = ([line[i].replace("|", r"\|") for i in kept] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def link(shown: str, heading: str) -> str:
    """Format a link to a heading of the page, with GitHub's anchor."""
    return f"[`{shown}`](#{re.sub(r'[^-_a-z0-9 ]', '', heading.lower()).replace(' ', '-')})"


def called(name: str, target: Any) -> str:
    """Format ``name(arguments)``, without types."""
    return f"{name}({', '.join(one.text for one in arguments(target))})"


def entry(heading: str, target: Any, first: str | None = None) -> str:
    """Format a function or class: heading, text, example, arguments, return value, errors.

    Args:
        heading: its displayed name.
        target: the function or class.
        first: its first line, if it differs from the docstring's.
    """
    doc = doc_of(target)
    parts = [f"### `{heading}`", doc.summary if first is None else first, *doc.body]
    if doc.example:
        parts.append(f"```python\n{doc.example}\n```")
    return "\n\n".join(part for part in [*parts, "\n".join(_list(target))] if part)


def _list(target: Any) -> Iterator[str]:
    """List documented arguments, return value and errors."""
    sections = doc_of(target).sections
    told = dict(sections.get("Args", []))
    for one in arguments(target):
        typed = f" (`{one.annotation}`)" if one.annotation else ""
        about = f": {told[one.name]}" if one.name in told else ""
        if typed or about:
            yield f"- `{one.name}`{typed}{about}"
    for section, word in (("Returns", "Returns"), ("Raises", "Refused")):
        for name, text in sections.get(section, []):
            yield f"- *{word}*{f' with `{name}`' if name else ''}: {text}"


def fields(cls: type, *without: str) -> str:
    """Tabulate the fields of a class, with the comments beside them."""
    rows = [
        (f"`{one.name}`", f"`{one.annotation}`", f"`{one.default}`" * bool(one.default), one.about)
        for one in members(cls)
        if one.name not in without
    ]
    return table(("name", "type", "default", "what it is"), rows)
