"""A table of a page generated from the files in results/."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["table"]


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, text: Collection[int] = (0,)
) -> str:
    """Format a table in Markdown.

    Args:
        head: names of the columns.
        rows: a cell for each column.
        text: indices of text columns, from 0, or from the end, -1; the others have numbers.
    """
    left = {column % len(head) for column in text}
    rule = ["---" if column in left else "--:" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rows))
