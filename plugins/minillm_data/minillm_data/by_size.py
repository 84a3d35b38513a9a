"""A list of pieces sorted by size, with best-fit lookup by bisection."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from minillm_core import Piece

__all__ = ["BySize"]


class BySize:
    """A list of pieces kept sorted by size, the oldest of a size last.

    Args:
        pieces: a packer's ``pending``, already sorted; modified in place, and only by this object.
    """

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces
        # stored keys: bisect would call a key function a dozen times per search
        self._keys = [(last - first, -first) for first, last in pieces]

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Piece]:
        return iter(self.pieces)

    def add(self, first: int, last: int) -> None:
        """Insert the piece ``[first, last)`` of the stream."""
        key = last - first, -first
        place = bisect_left(self._keys, key)
        self._keys.insert(place, key)
        self.pieces.insert(place, Piece(first, last))

    def up_to(self, tokens: int) -> int:
        """Count the pieces of at most ``tokens`` tokens."""
        return bisect_right(self._keys, (tokens, 1))

    def size(self, place: int) -> int:
        """Return the number of tokens of the piece at an index."""
        return self._keys[place][0]

    def pop(self, place: int) -> Piece:
        """Remove and return the piece at an index."""
        del self._keys[place]
        return self.pieces.pop(place)

    def place(self, piece: Piece) -> int | None:
        """Return the index of a piece; None if it is absent."""
        first, last = piece
        key = last - first, -first
        place = bisect_left(self._keys, key)
        return place if place < len(self._keys) and self._keys[place] == key else None
