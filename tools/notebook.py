"""Generator of the notebook of docs/python.md: the same text and code, cell by cell.

python -m tools.notebook             # print it
python -m tools.notebook --write     # write it
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

__all__ = ["NOTEBOOK", "PAGE", "cells", "notebook_of"]

PAGE = Path(__file__).parents[1] / "docs" / "python.md"
NOTEBOOK = PAGE.with_suffix(".ipynb")

_CODE = re.compile(r"^```python\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


def cells(page: str) -> list[tuple[str, str]]:
    """Split a page into ("markdown" or "code", its text)."""
    parts = _CODE.split(page)  # alternating text and code
    kinds = [("markdown", "code")[index % 2] for index in range(len(parts))]
    return [(kind, text.strip()) for kind, text in zip(kinds, parts, strict=True) if text.strip()]


def notebook_of(page: str) -> str:
    """Build the notebook of a page, in nbformat 4.5."""
    found = []
    for number, (kind, text) in enumerate(cells(page)):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        found.append({**cell, "source": text.splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    document = {
        "cells": found,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Print the notebook, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    text = notebook_of(PAGE.read_text("utf-8"))
    if given.write:
        NOTEBOOK.write_text(text, "utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
