"""Untrusted text made safe to print, and the formatting and look-up of names."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# The repetitions are bounded so that streams are not held back for long; real ones are shorter.
_SEQUENCES = (
    r"\x1b\[[0-?]{0,64}[ -/]{0,16}[@-~]"  # CSI: colours, cursor
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|\Z)"  # OSC, DCS, SOS, PM, APC: titles, links, payloads
    r"|\x1b[ -/]{0,16}[0-~]"  # two characters and their like
)
_SEQUENCE = re.compile(_SEQUENCES, re.DOTALL)
_UNSETTLED = re.compile(  # an incomplete control sequence at the end of the text
    r"(?P<unsettled>\x1b(?:"
    r"\[[0-?]{0,64}[ -/]{0,16}|[\]PX^_](?:(?!\x07|\x1b\\).)*|[ -/]{0,16}"
    r")\Z)|" + _SEQUENCES,
    re.DOTALL,
)
_CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]"  # C0, C1, invisible, bidi
)
_COMMAND = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"  # C0 but tab and newline, C1, bidi
)

_DECIMAL = re.compile(r"(?<![\w.])\d+\.\d+(?:e[+-]?\d+)?(?![\w.])")  # not part of a version
DIGITS = 6
"""Significant digits of a number shown to people; integers keep all digits."""


def quoted(*words: object) -> str:
    """Quote paths and other words of a suggested command for the shell."""
    return shlex.join(map(str, words))


def plain(text: str, limit: int = 300) -> str:
    """Return ``text`` on one line, without terminal control sequences, cut after ``limit`` characters."""
    words = (_CONTROL.sub("", word) for word in _SEQUENCE.sub("", text).split())
    line = " ".join(filter(None, words))
    return line if len(line) <= limit else line[: limit - 3] + "..."


def printable(text: str) -> str:
    """Remove terminal control sequences from ``text``; its lines and spaces stay."""
    return _COMMAND.sub("", _SEQUENCE.sub("", text))


def printable_so_far(text: str) -> tuple[str, str]:
    """Return the printable part of an incomplete streamed text, as :func:`printable` will show it.

    Returns:
        The printable text; and the rest to prepend to the next text: an incomplete control sequence,
        shortened to some 80 characters at most.
    """
    for match in _UNSETTLED.finditer(text):
        if match["unsettled"]:
            return printable(text[: match.start()]), _shortened(match["unsettled"])
    return printable(text), ""


def _shortened(unsettled: str) -> str:
    """Drop the payload of a control sequence: only its kind, and an escape that may end it, matter."""
    if unsettled[1:2] not in tuple("]PX^_"):
        return unsettled
    return unsettled[:2] + ("\x1b" if unsettled[2:].endswith("\x1b") else "")


def few(names: Sequence[str], shown: int = 3) -> str:
    """Format the first of several names, and the number of the others."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def listed(names: Sequence[str]) -> str:
    """Join names to ``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def finite(value: Any) -> Any:
    """Return ``value`` with None for each NaN and infinity in it, as JSON requires."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(part) for key, part in value.items()}
    return [finite(part) for part in value] if isinstance(value, list | tuple) else value


def rounded(text: str) -> str:
    """Round the long decimal numbers in ``text`` to six significant digits: for people, never for data.

    Integers, short numbers and versions do not change.
    """
    return _DECIMAL.sub(lambda found: _rounded(found[0]), text)


def _rounded(number: str) -> str:
    digits = number.partition("e")[0].replace(".", "").strip("0")
    value = float(number)
    if len(digits) <= DIGITS or value.is_integer() or math.isinf(value):
        return number
    return f"{value:.{DIGITS}g}"


def counted(count: float, one: str, form: str = ",") -> str:
    """Format a count of a word whose plural ends in s: ``1 slot``, ``2,000 slots``."""
    shown = f"{count:{form}}"
    return f"{shown} {one}{'' if shown == '1' else 's'}"


def are(subject: str, count: int) -> str:
    """Add the verb to a subject: ``1 file is``, ``2 files are``."""
    return f"{subject} {'is' if count == 1 else 'are'}"


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the name in ``known`` that was most likely meant by ``name``; None if none is near."""
    import difflib

    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def did_you_mean(name: str, known: Iterable[str], before: str = "") -> str:
    """Return the question that begins a fix, ``did you mean muon? ``; empty if no name is near.

    Args:
        name: the unknown name.
        known: the names that exist.
        before: what stands before a name, such as ``self.ops.``.
    """
    close = nearest(name, known)
    return f"did you mean {before}{close}? " if close else ""
