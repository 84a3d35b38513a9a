"""The name that was probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["nearest"]


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The one of ``names`` that looks most like ``word``; None if none looks like it."""
    found = get_close_matches(word.lower(), sorted(names), n=1, cutoff=0.6)
    return found[0] if found else None
