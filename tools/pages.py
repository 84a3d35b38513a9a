"""Pages with parts that are made: what stands between ``<!-- made: NAME -->`` and ``<!-- /made -->``."""

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
    """A page, and the parts of it that are made."""

    path: Path
    parts: Mapping[str, Callable[[], str]]  # name -> its text
    others: bool = False  # the page has parts too that are made elsewhere

    def text(self) -> str:
        """Read the page as it is."""
        return self.path.read_text("utf-8")

    def made(self) -> str:
        """Return the page as it should be."""
        return self.within(self.text())

    def within(self, text: str) -> str:
        """Return a page's text with its parts made anew.

        Raises:
            ValueError: a part is missing, is there twice, has no end, or is not made here.
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
    """Name the pages that are not as they should be, or write them; ``about`` is what ``--help`` says."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--write", action="store_true", help="write them")
    write = parser.parse_args().write
    for page in pages:
        if (text := page.made()) != page.text():
            print(page.path.relative_to(ROOT))
            if write:
                page.path.write_text(text, "utf-8")
