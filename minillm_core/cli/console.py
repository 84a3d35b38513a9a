"""What the commands write: documents and tables on stdout, messages and errors on stderr."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

import typer

from minillm_core.errors import MinillmError
from minillm_core.text import finite, printable

LINES = 12
"""An explanation of an error is at most this many lines."""

_PACKAGE = str(Path(__file__).parents[1])
_DOCUMENTS: ContextVar[TextIO | None] = ContextVar("where documents go", default=None)


def say(text: str) -> None:
    """Write a message to stderr; a run continues where the pipe has been closed (``|& head``)."""
    try:
        print(printable(text), file=sys.stderr, flush=True)
    except BrokenPipeError:
        nothing_more_to(sys.stderr)


def write(text: str, end: str = "\n") -> None:
    """Write to stdout at once; what its encoding cannot spell becomes a question mark.

    Raises:
        BrokenPipeError: its reader has closed the pipe.
        MinillmError: it cannot be written to, as to a file on a full disk.
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding), end=end, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        nothing_more_to(sys.stdout)  # or what is buffered would fail again at the exit
        raise MinillmError(
            f"stdout could not be written: {error.strerror}",
            where="stdout",
            fix="send it elsewhere, or make room",
        ) from error


def emit(document: Any) -> None:
    """Write one JSON document to stdout; numbers that JSON does not know become null."""
    with redirect_stdout(_DOCUMENTS.get() or sys.stdout):
        write(json.dumps(finite(document), indent=2, allow_nan=False))


@contextmanager
def documents_alone() -> Iterator[None]:
    """While it lasts :func:`emit` alone writes to stdout; what plugins print goes to stderr.

    Whatever thread they print in: a run's loader as well.
    """
    token = _DOCUMENTS.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _DOCUMENTS.reset(token)


def nothing_more_to(stream: TextIO) -> None:
    """Lose whatever is or will be written to a standard stream."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def explain(error: BaseException, *, debug: bool = False) -> tuple[str, int]:
    """Word an error for stderr; return the text and the exit code.

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
    """Find the last line of minillm_core that the error passed."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(_PACKAGE)]
    return f"{ours[-1].filename}:{ours[-1].lineno}" if ours else None
