"""The commands ``minillm data ...`` and their shared options; imports stay light, so that help is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from minillm_core.commands import folder

FILES = "Files or folders: text or JSON lines, also as .gz, .xz or .zst; Parquet or Arrow tables."
"""The help of the paths of a command."""

Paths = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH",
        help=FILES,
        show_default=False,
    ),
]
To = Annotated[
    Path,
    typer.Option(
        "--to", metavar="DIR", help="Output folder, which must not exist yet.", parser=folder
    ),
]
Malformed = Annotated[
    str,
    typer.Option(
        "--malformed",
        metavar="strict|skip",
        help="Malformed documents: stop with file, line and byte, or skip and count them.",
    ),
]


def check_malformed(value: str) -> Literal["strict", "skip"]:
    """Validate the value of --malformed and return it.

    Raises:
        ConfigError: the value is neither strict nor skip.
    """
    if value == "strict" or value == "skip":
        return value
    from minillm_core import ConfigError
    from minillm_core.commands import nearest

    close = nearest(value, ("strict", "skip"))
    fix = f"did you mean {close}?" if close else "one of strict, skip"
    raise ConfigError(f"--malformed {value!r} is none of its values", where="--malformed", fix=fix)
