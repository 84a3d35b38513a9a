"""What the commands write: documents and tables on stdout, messages on stderr."""

from __future__ import annotations

import json
import sys
from typing import Any

from minillm_core.text import printable

__all__ = ["emit", "say"]


def say(text: str) -> None:
    """Write a message to stderr."""
    print(printable(text), file=sys.stderr, flush=True)


def emit(document: Any) -> None:
    """Write one JSON document to stdout."""
    print(json.dumps(document, indent=2, allow_nan=False))
