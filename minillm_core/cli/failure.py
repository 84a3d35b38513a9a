"""How an error ends the program: its exit code, and at most twelve lines on stderr."""

from __future__ import annotations

import traceback
from pathlib import Path

import typer

from minillm_core.errors import MinillmError
from minillm_core.text import printable

__all__ = ["LINES", "explain"]

LINES = 12
"""An explanation is at most this many lines."""

_PACKAGE = str(Path(__file__).parents[1])


def explain(error: BaseException, *, debug: bool = False) -> tuple[str, int]:
    """What to print about an error, and the exit code.

    Args:
        error: whatever a command raised.
        debug: put the whole traceback before it.
    """
    if isinstance(error, typer.Abort) and error.__cause__ is not None:
        error = error.__cause__  # an end of file that typer took for one of stdin's
    text, code = _words(error)
    lines = printable(text).split("\n")
    if len(lines) > LINES:
        lines = [*lines[: LINES - 1], "  ... (--debug shows everything)"]
    if debug:
        lines.insert(0, printable("".join(traceback.format_exception(error))).rstrip())
    return "\n".join(lines), code


def _words(error: BaseException) -> tuple[str, int]:
    if isinstance(error, MinillmError):
        return str(error), error.exit_code
    if isinstance(error, typer.TyperException):  # a usage error: an unknown flag, a missing one
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "minillm"
        what = error.format_message().rstrip()
        return f"{command}: {what}\n  fix:   {command} --help", error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted: nothing was saved", 130
    place = _innermost(error)
    first, *more = str(error).splitlines() or [""]  # some frameworks write pages
    return (
        f"a defect in minillm: {type(error).__name__}: {first}"
        + (" ..." if more else "")
        + (f"\n  where: {place}" if place else "")
        + "\n  fix:   run it again with --debug for the traceback, and please report it",
        1,
    )


def _innermost(error: BaseException) -> str | None:
    """The last line of ours that the error passed."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(_PACKAGE)]
    return f"{ours[-1].filename}:{ours[-1].lineno}" if ours else None
