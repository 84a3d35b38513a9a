"""The commands ``minillm data ...``, and the options that they share; light, so that help comes at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Paths = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH",
        help="Files or folders: text, JSON lines, under .gz or .xz.",
        show_default=False,
    ),
]
To = Annotated[
    Path,
    typer.Option("--to", metavar="DIR", help="The folder to write; it must not exist yet."),
]
Malformed = Annotated[
    str,
    typer.Option(
        "--malformed",
        metavar="strict|skip",
        help="A document that cannot be read: stop with file, line and byte, or leave it out and count it.",
    ),
]


def check_malformed(value: str) -> Literal["strict", "skip"]:
    """Return a value of --malformed that is one of its values.

    Raises:
        ConfigError: it is none of them.
    """
    return check_choice("--malformed", value, ("strict", "skip"))  # type: ignore[return-value]


def check_choice(flag: str, value: str, choices: tuple[str, ...]) -> str:
    """Return a value that is one of the choices.

    Raises:
        ConfigError: it is none of them.
    """
    if value not in choices:
        from minillm_core import ConfigError
        from minillm_core.commands import nearest

        close = nearest(value, choices)
        fix = f"did you mean {close}?" if close else f"one of {', '.join(choices)}"
        raise ConfigError(f"{flag} {value!r} is none of its values", where=flag, fix=fix)
    return value
