"""Text that comes from somewhere else, made safe to print, and the nearest of several names."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["nearest", "plain", "printable"]

_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|\Z)"  # OSC, DCS, SOS, PM, APC: titles, links, payloads
    r"|\x1b[ -/]*[0-~]",  # two characters and their like
    re.DOTALL,
)
_CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]"  # C0, C1, invisible, bidi
)
_COMMAND = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"  # C0 but tab and newline, C1, bidi
)


def plain(text: str, limit: int = 300) -> str:
    """``text`` on one line, without terminal control sequences, cut after ``limit`` characters."""
    words = (_CONTROL.sub("", word) for word in _SEQUENCE.sub("", text).split())
    line = " ".join(filter(None, words))
    return line if len(line) <= limit else line[: limit - 3] + "..."


def printable(text: str) -> str:
    """``text`` with its lines and spaces, without what would command a terminal."""
    return _COMMAND.sub("", _SEQUENCE.sub("", text))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of ``known`` that ``name`` most likely meant; None if none is near."""
    import difflib

    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return found[0] if found else None
