"""What the commands write: documents and tables on stdout, messages on stderr."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from typing import Any

from minillm_core.text import printable

__all__ = ["emit", "say"]


def say(text: str) -> None:
    """Write a message to stderr; a run goes on where nobody reads it any more (``|& head``)."""
    try:
        print(printable(text), file=sys.stderr, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def emit(document: Any) -> None:
    """Write one JSON document to stdout; numbers that JSON does not know become null."""
    print(json.dumps(_finite(document), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
