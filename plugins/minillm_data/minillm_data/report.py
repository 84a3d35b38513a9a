"""The report of a command: report.json, its page, and the lines on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from minillm_core.commands import plain
from minillm_lab.markup import Markup, joined, tag
from minillm_lab.page import document, facts, section, table

EXAMPLE = 400
"""Characters of a document that a report shows."""

EXAMPLES = 5
"""Documents that a report shows of each reason."""


class Examples:
    """Documents that were dropped, a few for each reason, to be read by people."""

    def __init__(self, found: Mapping[str, list[dict[str, str]]] | None = None) -> None:
        self.found: dict[str, list[dict[str, str]]] = dict(found or {})

    def add(self, reason: str, where: str, text: str) -> None:
        """Keep the beginning of a document, unless there are enough of its reason."""
        kept = self.found.setdefault(reason, [])
        if len(kept) < EXAMPLES:
            kept.append({"where": where, "text": text[:EXAMPLE]})


def page(
    title: str,
    about: Mapping[str, object],
    counts: Mapping[str, int],
    examples: Mapping[str, Sequence[Mapping[str, str]]],
    *more: object,
    sizes: Mapping[str, int] | None = None,
) -> str:
    """Make a report's page.

    Args:
        title: of the page.
        about: its table of facts.
        counts: documents by what became of them.
        examples: reason -> documents, from :class:`Examples`.
        more: further sections.
        sizes: bytes by what became of them, beside the counts.
    """
    total = sum(counts.values()) or 1
    head, names = ["what became of it", ">documents", ">share"], _sorted(counts)
    rows = [[name, f"{n:,}", f"{100 * n / total:.2f} %"] for name, n in names]
    if sizes is not None:
        head.append(">MB")
        for row, (name, _) in zip(rows, names, strict=True):
            row.append(f"{sizes.get(name, 0) / 1e6:,.1f}")
    parts: list[object] = [facts(about), section("Documents", table(head, rows))]
    parts += more
    for reason, kept in examples.items():
        parts.append(section(f"Examples: {reason}", *map(_example, kept)))
    return document(title, *parts)


def _example(one: Mapping[str, str]) -> Markup:
    shown = tag("pre", one["text"], style="white-space: pre-wrap; overflow-wrap: anywhere")
    return joined(tag("p", tag("b", one["where"])), shown)


def summary(counts: Mapping[str, int], sizes: Mapping[str, int] | None = None) -> Iterable[str]:
    """Write a line for each count: ``  1,234  12.3 %  kept``; with sizes in bytes, also in MB."""
    total = sum(counts.values()) or 1
    for name, count in _sorted(counts):
        size = "" if sizes is None else f"{sizes.get(name, 0) / 1e6:>10,.1f} MB  "
        yield f"{count:>12,}  {100 * count / total:6.2f} %  {size}{plain(name)}"


def _sorted(counts: Mapping[str, int]) -> list[tuple[str, Any]]:
    """Order counts: kept first, then the most frequent reason."""
    return sorted(counts.items(), key=lambda pair: (pair[0] != "kept", -pair[1], pair[0]))
