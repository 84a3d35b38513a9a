"""A part of a page that is made from the files in results/: its tables, and its place on the page."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.command import parser
from benchmarks.environment import ROOT

__all__ = ["Part", "table"]


@dataclass(frozen=True)
class Part:
    """What stands on a page between two marks."""

    page: Path
    made: Callable[[], str]
    name: str = "measured"  # of the marks

    @property
    def begin(self) -> str:
        """The mark before it, with its line's end."""
        return f"<!-- {self.name} -->\n"

    @property
    def end(self) -> str:
        """The mark behind it."""
        return f"<!-- /{self.name} -->"

    def within(self, text: str) -> str:
        """Return a page's text with this part made anew.

        Raises:
            ValueError: the text does not have each mark once.
        """
        before, begin, rest = text.partition(self.begin)
        _, end, after = rest.partition(self.end)
        if not end or self.begin in after or self.end in after:
            raise ValueError(f"not once {self.begin.strip()} ... {self.end} in the page")
        return before + begin + self.made() + end + after

    def main(self, about: str | None) -> None:
        """Print the part, or write it with ``--write``; ``about`` is what ``--help`` says."""
        options = parser(about)
        where = self.page.relative_to(ROOT)
        options.add_argument("--write", action="store_true", help=f"into {where}")
        if not options.parse_args().write:
            print(self.made(), end="")
            return
        self.page.write_text(self.within(self.page.read_text()))
        print(f"wrote {self.page}")


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, text: Collection[int] = (0,)
) -> str:
    """Write a table in Markdown.

    Args:
        head: names of the columns.
        rows: a cell for each column.
        text: the columns that hold text, from 0, or from the last, -1; the others hold numbers.
    """
    left = {column % len(head) for column in text}
    rule = ["---" if column in left else "--:" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rows))
