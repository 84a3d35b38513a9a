"""Text while it is being written: whole characters, and nothing that commands a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from minillm_core.text import printable, printable_so_far

__all__ = ["pieces"]


def pieces(ids: Iterable[int], decode: Callable[[int], str], before: str = "") -> Iterator[str]:
    """The text of ids, piece by piece as they come; joined it is ``printable`` of the whole.

    A control sequence that is not over yet is held back, also where it begins in ``before``; half
    a character at the end is left out.

    Args:
        ids: of the text.
        decode: id -> the text that it completes, as ``Tokenizer.stream`` gives it.
        before: the text that they continue: the first piece.
    """
    settled, held = printable_so_far(before)
    if settled:
        yield settled
    for index in ids:
        settled, held = printable_so_far(held + decode(index))
        if settled:
            yield settled
    if rest := printable(held):
        yield rest
