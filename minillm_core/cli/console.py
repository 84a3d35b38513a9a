"""What the commands write: documents and tables on stdout, messages on stderr."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from typing import Any, TextIO

from minillm_core.errors import MinillmError
from minillm_core.text import printable

__all__ = ["documents_alone", "emit", "nothing_more_to", "say", "write"]

_DOCUMENTS: ContextVar[TextIO | None] = ContextVar("where documents go", default=None)


def say(text: str) -> None:
    """Write a message to stderr; a run goes on where nobody reads it any more (``|& head``)."""
    try:
        print(printable(text), file=sys.stderr, flush=True)
    except BrokenPipeError:
        nothing_more_to(sys.stderr)


def write(text: str, end: str = "\n") -> None:
    """Write to stdout at once; what its encoding cannot spell becomes a question mark.

    Raises:
        BrokenPipeError: nobody reads it any more.
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
        write(json.dumps(_finite(document), indent=2, allow_nan=False))


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


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
