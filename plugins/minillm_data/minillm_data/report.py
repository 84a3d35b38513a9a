"""The report of a data command: report.json, its HTML page, and its lines on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from minillm_core.commands import plain
from minillm_data.files import size_of
from minillm_lab.markup import Markup, joined, tag
from minillm_lab.page import document, facts, section, table

EXAMPLE = 400
"""Characters shown per example document."""

EXAMPLES = 5
"""Example documents per reason."""


class Examples:
    """Examples of dropped documents, a few per reason, for review."""

    def __init__(self, found: Mapping[str, list[dict[str, str]]] | None = None) -> None:
        self.found: dict[str, list[dict[str, str]]] = dict(found or {})

    def add(self, reason: str, where: str, text: str) -> None:
        """Add the beginning of a document, unless its reason has enough examples."""
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
    """Render a report's HTML page.

    Args:
        title: the page's title.
        about: the table of facts.
        counts: number of documents by outcome.
        examples: reason -> documents, from :class:`Examples`.
        more: further sections.
        sizes: bytes by outcome, shown beside the counts.
    """
    total = sum(counts.values()) or 1
    head, names = ["what became of it", ">documents", ">share"], _sorted(counts)
    rows = [[name, f"{n:,}", f"{100 * n / total:.2f} %"] for name, n in names]
    if sizes is not None:
        head.append(">text")
        for row, (name, _) in zip(rows, names, strict=True):
            row.append(size_of(sizes.get(name, 0)))
    parts: list[object] = [facts(about), section("Documents", table(head, rows))]
    parts += more
    for reason, kept in examples.items():
        parts.append(section(f"Examples: {reason}", *map(_example, kept)))
    return document(title, *parts)


def _example(one: Mapping[str, str]) -> Markup:
    shown = tag("pre", one["text"], style="white-space: pre-wrap; overflow-wrap: anywhere")
    return joined(tag("p", tag("b", one["where"])), shown)


def summary(counts: Mapping[str, int], sizes: Mapping[str, int] | None = None) -> Iterable[str]:
    """Yield a line per count: ``  1,234  12.3 %  kept``; with sizes in bytes, also these."""
    total = sum(counts.values()) or 1
    for name, count in _sorted(counts):
        size = "" if sizes is None else f"{size_of(sizes.get(name, 0)):>13}  "
        yield f"{count:>12,}  {100 * count / total:6.2f} %  {size}{plain(name)}"


def _sorted(counts: Mapping[str, int]) -> list[tuple[str, Any]]:
    """Sort counts: kept first, then reasons by frequency."""
    return sorted(counts.items(), key=lambda pair: (pair[0] != "kept", -pair[1], pair[0]))
