"""What a person asks about: a slot, a parameter or an op, or the beginning of one, with ``*``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from minillm_core.plan.why.answer import Answer, names_of

__all__ = ["Pattern", "nearest_names"]


class Pattern:
    """A name, or the beginning of one up to a ``.`` or ``[``; ``*`` is any text.

    Args:
        text: ``attn.qk``, ``layers.2.*``, ``model.mlp[3]``, ``head.weight``, ``rms_norm``.
    """

    def __init__(self, text: str) -> None:
        inner = ".*".join(re.escape(part) for part in text.strip().rstrip(".").split("*"))
        self._fits = re.compile(rf"{inner}($|[.\[])").match

    def picks(self, answer: Answer) -> bool:
        """Whether the answer is asked for."""
        return any(self._fits(name) for name in names_of(answer))


def nearest_names(text: str, answers: Iterable[Answer]) -> list[str]:
    """The names, or beginnings of names, that the text most likely meant; three at most."""
    known: set[str] = set()
    for answer in answers:
        for name in names_of(answer):
            parts = re.split(r"(?=[.\[])", name)
            known.update("".join(parts[:end]) for end in range(1, len(parts) + 1))
    return difflib.get_close_matches(text, sorted(known), n=3, cutoff=0.6)
