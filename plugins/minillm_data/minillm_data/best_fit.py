"""Best-fit packing: rows of whole documents, each filled by the largest ones that fit.

Ding et al. 2024 (arXiv:2404.10830, "Fewer Truncations Improve Language Modeling"): laid end to end, a
document is cut wherever a row ends, and what follows is read without its beginning. Here no
document that fits into a row is ever split. The paper sorts a whole corpus; this packer keeps a
buffer of documents, so that it begins at once and its memory is bounded.

A row begins with the document that has waited longest, and then takes, as often as one fits, the
largest document of the buffer that fits into the room left. The paper begins with the largest; then
a run would begin with rows of the longest documents alone, and one that never fits behind
another could wait for ever. Measured on English web text with a buffer of 1,000, both leave as much
padding (the README has the figures).

What it costs: the room that no document fits into is padding; the order of the documents is
no longer that of the shuffle, but within the buffer's reach; with fewer documents than
the buffer holds, several epochs mix. Documents share a row, and attention crosses their
boundaries unless a plugin keeps them apart (``windows.documents``).
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from minillm_core import Packer, Piece, Plugin, option
from minillm_data.by_size import BySize

__all__ = ["BestFit", "BestFitPacker"]


class BestFit(Plugin, api=1):
    """Rows hold whole documents, each filled by the largest ones that fit; the rest is padding."""

    buffer: int = option(1000, ge=1, le=100_000, help="documents to choose from")

    def build_data(self, data):
        data.packer(BestFitPacker, buffer=self.buffer)


class BestFitPacker(Packer):
    """Rows that begin with the document that waited longest, and are filled by best fit.

    A document that is longer than a row is cut into pieces of a row's size, and its rest is packed
    like any document, and so is one that waited while rows became shorter: nothing of it is lost, but the token at a cut is not predicted. The run's last lines
    count such pieces.

    Args:
        capacity: tokens of a row.
        buffer: pieces that are pending while a row is filled; those of the document that was taken
            last may be more.
    """

    any_capacity = True

    def __init__(self, capacity: int, buffer: int) -> None:
        super().__init__(capacity)
        self.buffer = buffer
        self._waiting, self._ages = BySize(self.pending), list[Piece]()

    def row(self, take: Callable[[], Piece]) -> list[Piece]:
        """Return the next row; ``pending`` is sorted by size, of one size the oldest last."""
        if self._waiting.pieces is not self.pending:  # a resumed run puts another one there
            self._waiting, self._ages = BySize(self.pending), sorted(self.pending)
        waiting = self._waiting
        self._refill(take)
        while (place := waiting.place(oldest := heappop(self._ages))) is None:
            pass  # it has filled a row
        waiting.pop(place)
        if oldest.tokens > self.capacity:  # it was taken for a longer row
            self._add(oldest.first + self.capacity, oldest.last)
            oldest = oldest.part(0, self.capacity)
        row, room = [oldest], self.capacity - oldest.tokens
        while True:
            self._refill(take)
            if not (fitting := waiting.up_to(room)):
                return row
            room -= waiting.size(fitting - 1)
            row.append(waiting.pop(fitting - 1))

    def _refill(self, take: Callable[[], Piece]) -> None:
        while len(self._waiting) < self.buffer:
            begin, end = take()
            for first in range(begin, end, self.capacity):
                self._add(first, min(first + self.capacity, end))

    def _add(self, first: int, last: int) -> None:
        self._waiting.add(first, last)
        heappush(self._ages, Piece(first, last))
