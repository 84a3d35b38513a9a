"""Places to divide a text, and the cutting of very long words.

Byte-level BPE first splits a text into words (letters, digits, other characters, white space) and then
merges within each word; a word of megabytes (DNA, NUL bytes, a row of dashes) takes long. A text is
therefore divided at certain word boundaries, which changes no id; a stretch of more than WORD characters
without one is cut every WORD characters. Training time grows with the square of a word's length, so
training cuts at LEARNED characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

WORD = 1 << 16
"""Characters; a longer word is cut before it is encoded (1,024 characters in 0.5 ms, 131,072 in 60)."""

LEARNED = 1 << 10
"""Characters; a longer word is cut before a tokenizer is trained on it."""

PIECE = 1 << 20
"""Bytes of a text file that are read together, and characters that are encoded whole by a tokenizer
that cannot be divided at word boundaries."""

_PART = 1 << 13  # characters; longer texts are divided, so that all cores share the work
_SEARCHED = 1 << 16  # characters; during a search of ``re`` Python handles no signal

# Characters that every version of Unicode classifies alike, here and in ``tokenizers``.
_LETTERS = (
    "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0391-\u03a1\u03b1-\u03c9\u0410-\u044f"
    "\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
_MARKS = (
    r"!-&(-/:-@\[-`{-~\u2014\u2018-\u201f\u2026\u3001-\u3003\u3008-\u3011\uff01-\uff0f\uff1a-\uff20"
)
BOUNDARY = re.compile(  # the character before one; an apostrophe may begin "'s", a word of its own
    rf"\S(?=[ \t\r\n])|[{_LETTERS}](?=[0-9'{_MARKS}])|[0-9](?=[{_LETTERS}'{_MARKS}])"
    rf"|[{_MARKS}](?=[0-9{_LETTERS}])"
)


class Continued(str):
    """A further piece of a text document, after its first piece."""

    __slots__ = ()


def parts(text: str, word: int = WORD) -> Iterator[tuple[str, int]]:
    """Yield a text in parts that are pre-tokenised and encoded separately; longer words are cut.

    Each part has a number: 0 for uncut words; 1 for the first characters of a cut word, 2 for the next ones,
    and so on.
    """
    start = 0
    for first, end in _endless(text, word):
        yield from ((part, 0) for part in _between(text, start, first))
        for number, place in enumerate(range(first, end, word), 1):
            yield text[place : min(place + word, end)], number
        start = end
    yield from ((part, 0) for part in _between(text, start, len(text)))


def divide(text: str) -> int:
    """Return the last good place to divide a long text: before the end of a line, else near its end.

    A letter or digit before a line's end is a boundary for the other pre-tokenizers in use as well.
    """
    place = text.rfind("\n")
    while place > 0:
        if text[place - 1].isalnum():
            return place
        place = text.rfind("\n", 0, place)
    found = [match.end() for match in BOUNDARY.finditer(text, max(len(text) - 2 * WORD, 0))]
    return found[-1] if found else max(len(text) // WORD * WORD, 1)


def _between(text: str, start: int, end: int) -> Iterator[str]:
    """Yield a stretch without long words in parts of about _PART characters."""
    while end - start > _PART:
        if (boundary := BOUNDARY.search(text, start + _PART - 1, end)) is None:
            break
        yield text[start : boundary.end()]
        start = boundary.end()
    if start < end:
        yield text[start:end]


def _endless(text: str, word: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of each stretch of more than ``word`` characters without a boundary inside.

    Such a stretch covers at least one whole block of half as many characters, so that in other text only a
    few characters of each block are examined.
    """
    place, block = 0, word // 2
    while place + block <= len(text):
        if BOUNDARY.search(text, place, place + block):
            place += block
            continue
        before = [m.end() for m in BOUNDARY.finditer(text, max(place - block, 0), place + 1)]
        first = before[-1] if before else max(place - block, 0)
        end = _next_boundary(text, place + block - 1)
        if end - first > word:
            yield first, end
        place = -(-end // block) * block


def _next_boundary(text: str, start: int) -> int:
    """Return the first boundary after the character ``start``, else the text's end."""
    for place in range(start, len(text), _SEARCHED):
        if boundary := BOUNDARY.search(text, place, place + _SEARCHED + 1):
            return boundary.end()
    return len(text)
