"""Pieces sorted by size: which has a size, and which fits best, by bisection on numbers alone."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from minillm_core import Piece

__all__ = ["BySize"]


class BySize:
    """A list of pieces that stays sorted by size, of one size the oldest last.

    Args:
        pieces: sorted so; a packer's ``pending``, which is changed in place. Nothing else may
            change it.
    """

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces
        # beside the pieces: a key function would be called a dozen times a search
        self._keys = [(last - first, -first) for first, last in pieces]

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Piece]:
        return iter(self.pieces)

    def add(self, first: int, last: int) -> None:
        """Add a piece, by its place in the stream."""
        key = last - first, -first
        place = bisect_left(self._keys, key)
        self._keys.insert(place, key)
        self.pieces.insert(place, Piece(first, last))

    def up_to(self, tokens: int) -> int:
        """Count the pieces of at most so many tokens."""
        return bisect_right(self._keys, (tokens, 1))

    def size(self, place: int) -> int:
        """Return the tokens of the piece at a place."""
        return self._keys[place][0]

    def pop(self, place: int) -> Piece:
        """Take the piece at a place out."""
        del self._keys[place]
        return self.pieces.pop(place)

    def place(self, piece: Piece) -> int | None:
        """Find a piece; None: it is not there."""
        first, last = piece
        key = last - first, -first
        place = bisect_left(self._keys, key)
        return place if place < len(self._keys) and self._keys[place] == key else None
