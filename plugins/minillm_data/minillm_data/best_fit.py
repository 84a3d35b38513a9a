"""Best-fit packing: rows of whole documents, each filled by the largest ones that fit.

Ding et al. 2024 (arXiv:2404.10830, "Fewer Truncations Improve Language Modeling"): concatenation cuts
a document wherever a row ends, and the rest is read without its beginning. Here no document that fits
into a row is ever split. The paper sorts a whole corpus; this packer works on a buffer of documents,
so that training starts at once and memory is bounded.

A row begins with the document that has waited longest, and then repeatedly takes the largest document
of the buffer that fits into the remaining room. The paper begins with the largest; then the first rows
of a run would hold the longest documents alone, and a document that never fits after another could
wait for ever. On English web text with a buffer of 1,000, both leave as much padding (the README has
the figures).

Cost: room that no document fits into is padding; the documents' order differs from the shuffle, within
the buffer's reach; with fewer documents than the buffer holds, several epochs mix. Documents share a
row, and attention crosses their boundaries unless a plugin masks it (``windows.documents``).
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from minillm_core import Packer, Piece, Plugin, option
from minillm_data.by_size import BySize

__all__ = ["BestFit", "BestFitPacker"]


class BestFit(Plugin, api=1):
    """Rows of whole documents, the largest that fit first; the rest is padding."""

    buffer: int = option(
        1000, ge=1, le=32_768, help="documents in the buffer from which rows are filled"
    )

    def build_data(self, data):
        data.packer(BestFitPacker, buffer=self.buffer)


class BestFitPacker(Packer):
    """A best-fit packer: each row begins with the document that waited longest.

    A document longer than a row waits as two pieces: as many whole rows as it fills, from which a row is
    cut when one begins with them, and the rest, which is packed like any document. A piece that waited
    while rows became shorter is cut in the same way. No token is lost, but the token at a cut is not
    predicted. The run's last lines count such pieces.

    Args:
        capacity: tokens of a row.
        buffer: pieces pending while a row is filled; the last document may add one more.
    """

    any_capacity = True

    def __init__(self, capacity: int, buffer: int) -> None:
        super().__init__(capacity)
        self.buffer = buffer
        self._waiting, self._ages = BySize(self.pending), list[Piece]()

    def row(self, take: Callable[[], Piece]) -> list[Piece]:
        """Return the next row; ``pending`` stays sorted by size, the oldest of a size last."""
        if self._waiting.pieces is not self.pending:  # replaced when a run resumes
            self._waiting, self._ages = BySize(self.pending), sorted(self.pending)
        waiting = self._waiting
        self._refill(take)
        while (place := waiting.place(oldest := heappop(self._ages))) is None:
            pass  # already used to fill a row
        waiting.pop(place)
        if oldest.tokens > self.capacity:
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
            tail = end - (end - begin) % self.capacity
            for first, last in ((begin, tail), (tail, end)):
                if first < last:
                    self._add(first, last)

    def _add(self, first: int, last: int) -> None:
        self._waiting.add(first, last)
        heappush(self._ages, Piece(first, last))
