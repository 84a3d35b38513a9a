"""The output of commands: documents and tables on stdout, messages and errors on stderr."""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

import typer

from minillm_core.errors import MinillmError
from minillm_core.text import finite, printable

LINES = 12
"""Largest number of lines of an error's explanation."""

_PACKAGE = str(Path(__file__).parents[1])
_DOCUMENTS: ContextVar[TextIO | None] = ContextVar("where documents go", default=None)


class Messages(io.FileIO):
    """A stderr that ends no run: once it cannot be written, it is silenced.

    Its reader may have gone (``|& head``), its terminal too, or its disk may be full.
    """

    def write(self, data: Any) -> int:
        """Write as much as the system takes; report all as written if it takes no more."""
        with suppress(OSError):
            return super().write(data)
        silence(self)
        return len(data)


class Documents(io.FileIO):
    """A stdout whose failed writes, such as to a full disk, are errors with a reason, not defects."""

    def write(self, data: Any) -> int:
        """Write as much as the system takes.

        Raises:
            BrokenPipeError: the reader has closed the pipe.
            MinillmError: stdout is not writable, such as a file on a full disk.
        """
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            silence(self)  # otherwise the buffer would fail again at exit
            raise MinillmError(
                f"stdout could not be written: {error.strerror}",
                where="stdout",
                fix="send it elsewhere, or make room",
            ) from error


def opened(raw: type[io.FileIO], stream: io.TextIOWrapper) -> TextIO:
    """Return a stream for :class:`Messages` or :class:`Documents` with the descriptor and encoding of this one."""
    buffer = io.BufferedWriter(raw(stream.fileno(), "w", closefd=False))
    lines = stream.line_buffering or stream.write_through  # the latter of python -u
    return io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=lines)


def say(text: str) -> None:
    """Write a message to stderr."""
    print(printable(text), file=sys.stderr, flush=True)


def write(text: str, end: str = "\n") -> None:
    """Write to stdout and flush; characters outside its encoding become question marks.

    Raises as :meth:`Documents.write`.
    """
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), end=end, flush=True)


def emit(document: Any) -> None:
    """Write one JSON document to stdout; NaN and infinity become null."""
    with redirect_stdout(_DOCUMENTS.get() or sys.stdout):
        write(json.dumps(finite(document), indent=2, allow_nan=False))


@contextmanager
def documents_alone() -> Iterator[None]:
    """Reserve stdout for :func:`emit` inside the context; output printed by plugins goes to stderr.

    This covers all threads, such as the dataloader's.
    """
    token = _DOCUMENTS.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _DOCUMENTS.reset(token)


def silence(stream: TextIO | io.FileIO) -> None:
    """Discard buffered and future output of a standard stream."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def explain(error: BaseException, *, debug: bool = False) -> tuple[str, int]:
    """Return the text of an error for stderr, and the exit code.

    Args:
        error: the exception that a command raised.
        debug: prepend the whole traceback.
    """
    if isinstance(error, typer.Abort) and error.__cause__ is not None:
        error = error.__cause__  # typer takes any EOFError for the end of stdin
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
        fix = f"{command} --help"
        name = getattr(error, "option_name", "") if hasattr(error, "possibilities") else ""
        if name and context and any(one.metavar == "KEY=VALUE" for one in context.command.params):
            from minillm_core.config.check import settings_like

            like = settings_like(name.strip("-").replace("-", "_"))
            fix += f"; settings have no dashes: {'=... or '.join(like or ['train.lr'])}=..."
        if context and (example := _example(error, context.command.epilog or "")):
            fix = f"{example}, for example; {fix}"
        return f"{command}: {error.format_message().rstrip()}\n  fix:   {fix}", error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted: nothing was saved", 130
    place = _innermost(error)
    first, *more = str(error).splitlines() or [""]  # some frameworks write very long messages
    return (
        f"a defect in minillm: {type(error).__name__}: {first}"
        + (" ..." if more else "")
        + (f"\n  where: {place}" if place else "")
        + "\n  fix:   run it again with --debug for the traceback, and please report it",
        1,
    )


def _example(error: Exception, page: str) -> str | None:
    """Return the first example on a command's help page that has the option of a usage error.

    Every example has the arguments, which are not named there.
    """
    param = getattr(error, "param", None)
    options = {getattr(error, "option_name", None), *getattr(param, "opts", ())}
    if getattr(param, "param_type_name", None) == "argument":
        options = {"minillm"}
    lines = map(str.strip, page.splitlines())
    return next((line for line in lines if options.intersection(line.split())), None)


def _innermost(error: BaseException) -> str | None:
    """Return the innermost line of minillm_core in the error's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(_PACKAGE)]
    return f"{ours[-1].filename}:{ours[-1].lineno}" if ours else None
