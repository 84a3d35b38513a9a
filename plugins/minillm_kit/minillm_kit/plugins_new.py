"""``minillm plugins new``: create a complete package, and print the next commands."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from minillm_core.commands import plain, write
from minillm_kit.scaffold import Names, write_package

EXAMPLES = """Examples:

minillm plugins new head_gate

minillm plugins new my_rule --kind optimizer --dir ~/plugins
"""


def new_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the plugin.")],
    kind: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="Template: attention, model, loss, optimizer, kernel, data or observer.",
        ),
    ] = "attention",
    folder: Annotated[
        str,
        typer.Option("--dir", metavar="DIR", help="Folder to create minillm-NAME in."),
    ] = ".",
) -> None:
    """Create a complete package: a working plugin, its reference, tests and CI. Needs no network."""
    place, holder = Path(folder).expanduser(), author()
    paths = write_package(name, kind, place, holder)
    names = Names(name)
    target = place / names.distribution
    listed = {path.relative_to(target).as_posix(): path for path in paths}
    width = max(map(len, listed))
    article = "an" if kind[0] in "aeiou" else "a"
    installed = str(target) if target.is_absolute() else f"./{target}"  # pip looks up bare names
    counts = {short: len(path.read_text("utf-8").splitlines()) for short, path in listed.items()}
    lines = (
        f"{target}: {article} {kind} plugin that works; make it yours",
        *(f"  {short:{width}}  {n:>4} line{'s' * (n != 1)}" for short, n in counts.items()),
        f"by {plain(holder)}, as LICENSE and pyproject.toml say",
        "next:",
        f"  pip install -e {shlex.quote(installed)}",
        f"  minillm plugins check {names.plugin}",
        f"  minillm train --plugins {names.plugin}",
    )
    write("\n".join(lines))


def author() -> str:
    """Return the copyright holder: git's user name, else a generic one."""
    unknown = "The authors"
    git = shutil.which("git")
    if git is None:
        return unknown
    try:
        found = subprocess.run(
            [git, "config", "user.name"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return unknown
    return found.stdout.strip() or unknown
