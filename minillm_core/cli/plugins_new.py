"""``minillm plugins new``: a package that is complete, and what to type next."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from minillm_core.plugins.scaffold import Names, write_package
from minillm_core.text import plain

__all__ = ["new", "render"]


def new(name: str, kind: str, folder: Path) -> str:
    """Write the package; returns what is printed.

    Raises:
        Refusal: nothing was written.
    """
    holder = author()
    paths = write_package(name, kind, folder, holder)
    return render(Names(name), kind, folder, paths, holder)


def author() -> str:
    """Who holds the copyright: the name that git knows, else everybody who wrote it."""
    unknown = "The authors"
    git = shutil.which("git")
    if git is None:
        return unknown
    try:
        asked = subprocess.run(
            [git, "config", "user.name"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return unknown
    return asked.stdout.strip() or unknown


def render(names: Names, kind: str, folder: Path, paths: Sequence[Path], holder: str) -> str:
    """The files with their lines, in whose name they are, and the commands that come next."""
    target = folder / names.distribution
    place = str(target) if target.is_absolute() else f"./{target}"  # pip would look a name up
    width = max(len(path.relative_to(target).as_posix()) for path in paths)
    article = "an" if kind[0] in "aeiou" else "a"
    return "\n".join(
        (
            f"{target}: {article} {kind} plugin that works; make it yours",
            *(
                f"  {path.relative_to(target).as_posix():{width}}  {lines(path):>4} lines"
                for path in paths
            ),
            f"by {plain(holder)}, as LICENSE and pyproject.toml say",
            "next:",
            f"  pip install -e {shlex.quote(place)}",
            f"  minillm plugins check {names.plugin}",
            f"  minillm train --plugins {names.plugin}",
        )
    )


def lines(path: Path) -> int:
    """How long a file is."""
    return len(path.read_text("utf-8").splitlines())
