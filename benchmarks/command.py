"""The common command line of benchmarks, and the result file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.environment import RESULTS, write

__all__ = ["add_text", "measuring", "parser", "written"]


def parser(about: str | None) -> argparse.ArgumentParser:
    """Build a parser without options; ``--help`` shows the module's docstring unchanged."""
    return argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )


def measuring(about: str | None, name: str) -> argparse.ArgumentParser:
    """Build the parser of a benchmark that writes a result file of this name."""
    made = parser(about)
    made.add_argument("--name", default=name, help="of the result file")
    made.add_argument("--out", type=Path, default=RESULTS, help="the result file's folder")
    made.add_argument("--commit", help="what is measured, for a copy that came without .git")
    return made


def add_text(made: argparse.ArgumentParser) -> None:
    """Add the options of the text that is trained on."""
    made.add_argument("--train", required=True, help="the text to train on")
    made.add_argument("--val", required=True, help="the text to validate on")
    made.add_argument("--tokenizer", required=True)


def written(given: argparse.Namespace, figures: Any) -> Path:
    """Write the figures to the requested place; return the file's path."""
    return write(given.name, figures, commit=given.commit, folder=given.out)
