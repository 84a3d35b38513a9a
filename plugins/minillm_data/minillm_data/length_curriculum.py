"""Rows of one document each, whose lengths are powers of two: Dataset Decomposition with a curriculum.

Pouransari et al. 2024 (arXiv:2405.13226): laid end to end, documents of all lengths share rows of
one length, and attention pays for rows that are longer than what is in them. Here a document is cut
into pieces whose lengths are powers of two, the longest first (1,100 tokens: 1,024, 64, 8, 4), and a
row is one piece. All rows of a step have one length, and the shorter they are the more there are:
a step has the same number of tokens, within the rounding of rows to whole numbers. Steps with short
rows come first and those with long rows last, in each of several cycles.

The paper draws from buckets of the whole text without putting back, so that short pieces run out
first. A stream has no whole buckets: here the odds themselves move. At the start of a cycle each length
is ``growth`` times as likely as the one twice as long, in the middle all are alike, at its end it is
the other way round, as in the paper's curricula that grow by powers; 1 is no curriculum.
Draws are spread evenly over the steps, from a point that data.seed chooses: the length of a step is
known while planning.

What holds: no row has tokens of two documents, and none has padding; no token is in two rows; the
label of a row's last token is the token that follows it in the text. Every token is used, but the end
of a document that is shorter than ``least``. Pieces of other lengths than a step asks for wait, at
most about ``buffer`` of them. Where they are more, a longer one is halved; where none is longer, the
shortest is cut: that happens where the curriculum asks for more long rows than there are long
documents. The run's last lines count what was cut.

What it costs: each length is compiled; a document is read in parts, with no attention between them;
with few long documents many short pieces are cut; the loader lays out 7 million tokens a second
on one core, the fewer the shorter rows are.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from minillm_core import DataError, Packer, Piece, PlanError, Plugin, option
from minillm_data.by_size import BySize

__all__ = ["LengthCurriculum", "LengthPacker", "drawn"]

LENGTHS = 6
"""Lengths where none is given as the least: as many as the paper's, 256 to 8,192."""

SEARCHED = 100_000
"""Documents without a piece that is long enough, after which a row is given up."""

_STEP, _SEED = (math.sqrt(5) - 1) / 2, math.sqrt(2)  # irrational: multiples spread evenly over 0..1


class LengthCurriculum(Plugin, api=1):
    """Every row is a piece of one document, a power of two long; short rows first, in cycles."""

    least: int | None = option(
        None, ge=1, help="tokens of the shortest rows, a power of two; none: a 32nd of the longest"
    )
    growth: float = option(
        2.0, ge=1, le=100, help="odds of a length over the next one at a cycle's start; 1: alike"
    )
    cycles: int = option(8, ge=1, search=(4, 8, 16), help="times that rows grow from short to long")
    buffer: int = option(1000, ge=1, le=100_000, help="pieces that wait for a step of their length")

    def build_data(self, data):
        longest = 1 << (data.seq_len.bit_length() - 1)
        least = self.least or max(longest >> (LENGTHS - 1), min(2, longest))
        if least & (least - 1) or least > longest:
            raise PlanError(
                f"length_curriculum.least={least} is no power of two up to {longest}",
                where=f"train.seq_len={data.seq_len}",
                fix=f"length_curriculum.least={max(1, longest >> 3)}, or leave it out",
            )
        if longest < data.seq_len:
            data.note(f"the longest rows have {longest} tokens, not train.seq_len={data.seq_len}")
        lengths = [least << n for n in range((longest // least).bit_length())]
        shapes = [(data.rows * data.seq_len // length, length) for length in lengths]
        given = {"lengths": len(lengths), "growth": self.growth, "cycles": self.cycles}
        data.shapes(drawn, shapes, **given)
        data.packer(LengthPacker, least=least, buffer=self.buffer)


def drawn(step: int, steps: int, seed: int, *, lengths: int, growth: float, cycles: int) -> int:
    """Draw which of so many lengths a step has, 0 the shortest.

    Args:
        step: from 1.
        steps: of the run.
        seed: data.seed.
        lengths: how many there are.
        growth: odds of a length over the next one at the start of a cycle, the inverse at its end.
        cycles: in the run.
    """
    place = (step - 1) / steps * cycles % 1.0
    odds = [growth ** ((2 * place - 1) * index) for index in range(lengths)]
    left = sum(odds) * ((_STEP * step + _SEED * seed) % 1.0)
    for index, one in enumerate(odds):
        left -= one
        if left < 0:
            return index
    return lengths - 1


class LengthPacker(Packer):
    """Rows of one piece each, of all but one of the capacity's tokens: a power of two.

    ``pending`` is sorted by size, of one size the oldest last. All pieces in it are powers of two from
    ``least`` to the longest, but the rest of a document that is longer yet, which is one piece.

    Args:
        capacity: of the longest rows, or more.
        least: tokens of the shortest piece.
        buffer: pieces that wait; the last document's may be more.
    """

    any_capacity = True

    def __init__(self, capacity: int, least: int, buffer: int) -> None:
        super().__init__(capacity)
        self.least, self.longest = least, 1 << ((capacity - 1).bit_length() - 1)
        self.buffer = buffer
        self._waiting = BySize(self.pending)

    def row(self, take: Callable[[], Piece]) -> list[Piece]:
        """Return the next row: the piece of its length that waited longest.

        Raises:
            DataError: a hundred thousand documents have none.
        """
        if self._waiting.pieces is not self.pending:  # a resumed run puts another one there
            self._waiting = BySize(self.pending)
        length, taken, waiting = self.capacity - 1, 0, self._waiting
        while True:
            place = waiting.up_to(length)
            if place and waiting.size(place - 1) == length:
                return [waiting.pop(place - 1)]
            if place < len(waiting) and (length == self.longest or len(waiting) >= self.buffer):
                self._divide(waiting.pop(waiting.up_to(waiting.size(place)) - 1))
            elif len(waiting) >= self.buffer:
                waiting.pop(0)  # the shortest; it is counted as cut
            elif taken == SEARCHED:
                raise DataError(
                    f"{taken:,} documents in a row have fewer than {length:,} tokens, which a row has",
                    where="length_curriculum",
                    fix=f"a train.seq_len below {length:,}, or longer documents",
                )
            else:
                taken += 1
                self._add(take())

    def _divide(self, piece: Piece) -> None:
        """Halve a piece; of what is longer than the longest row, cut such a row off."""
        first, last = piece
        if last - first > self.longest:
            self._add(piece)
        else:
            half = first + (last - first) // 2
            self._waiting.add(first, half)
            self._waiting.add(half, last)

    def _add(self, piece: Piece) -> None:
        """Cut a document, or the rest of one, into powers of two; much is left for later as one piece."""
        first, last = piece
        if last - first >= 2 * self.longest:
            self._waiting.add(first, first + self.longest)
            self._waiting.add(first + self.longest, last)
            return
        length = self.longest
        while length >= self.least:
            if last - first >= length:
                self._waiting.add(first, first + length)
                first += length
            length //= 2
