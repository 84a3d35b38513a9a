"""Pages with generated parts, between ``<!-- made: NAME -->`` and ``<!-- /made -->``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.repository import ROOT

__all__ = ["Page", "main"]

END = "<!-- /made -->"


@dataclass(frozen=True)
class Page:
    """A page and its generated parts."""

    path: Path
    parts: Mapping[str, Callable[[], str]]  # name -> the function that generates its text
    others: bool = False  # whether the page also has parts generated elsewhere

    def text(self) -> str:
        """Read the page's current text."""
        return self.path.read_text("utf-8")

    def generated(self) -> str:
        """Generate the page's up-to-date text."""
        return self.within(self.text())

    def within(self, text: str) -> str:
        """Return a page's text with its parts regenerated.

        Raises:
            ValueError: a part is missing, is duplicated, has no end mark, or is not generated here.
        """
        names = re.findall(r"^<!-- made: (.+) -->$", text, re.MULTILINE)
        found = [name for name in names if name in self.parts or not self.others]
        if sorted(found) != sorted(self.parts):
            raise ValueError(f"the page has the parts {sorted(found)}, not {sorted(self.parts)}")
        for name, part in self.parts.items():
            begin = f"<!-- made: {name} -->\n"
            before, _, rest = text.partition(begin)
            old, end, after = rest.partition(END)
            if not end or "<!-- made: " in old:
                raise ValueError(f"the part {name} has no end, {END}")
            text = f"{before}{begin}{part().rstrip()}\n{END}{after}"
        return text


def main(about: str | None, *pages: Page) -> None:
    """Report the pages that are out of date, or write them; ``about`` is the description for ``--help``."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--write", action="store_true", help="write them")
    write = parser.parse_args().write
    for page in pages:
        if (text := page.generated()) != page.text():
            print(page.path.relative_to(ROOT))
            if write:
                page.path.write_text(text, "utf-8")
