"""Dataset Decomposition with a length curriculum: rows of one document each, of power-of-two lengths.

Pouransari et al. 2024 (arXiv:2405.13226): with concatenation, documents of all lengths share rows of
one length, and attention pays for rows longer than their documents. Here a document is cut into pieces
of power-of-two lengths, the longest first (1,100 tokens: 1,024, 64, 8, 4), and a row is one piece. All
rows of a step have one length, and the number of rows varies inversely: each step has the same number
of tokens, up to rounding to whole rows. Within each of several cycles, steps of short rows come first
and steps of long rows last.

The paper samples without replacement from buckets of the whole text, so that short pieces run out
first. A stream has no complete buckets; here the odds themselves change. At a cycle's start each length
is ``growth`` times as likely as its double, in the middle all are equally likely, at the end the odds
are inverted, as in the paper's curricula that grow by powers; 1: no curriculum. Draws are spread
evenly over the steps (a low-discrepancy sequence offset by data.seed): a step's length is known at
planning time.

Guarantees: no row has tokens of two documents, or padding; no token is in two rows; the label of a
row's last token is the token that follows it in the text. Every token is used, except ends of documents
shorter than ``least``. Pieces of other lengths than the step's wait, at most about ``buffer`` of them.
When the buffer is full, a longer piece is halved; if none is longer, the shortest is cut: this happens
where the curriculum needs more long rows than there are long documents. The run's last lines count the
cut tokens.

Cost: each length is compiled; a document is read in parts, without attention between them; with few
long documents many short pieces are cut; the dataloader lays out 7 million tokens per second on one
core, fewer with shorter rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from minillm_core import DataError, Packer, Piece, PlanError, Plugin, option
from minillm_data.by_size import BySize

__all__ = ["LengthCurriculum", "LengthPacker", "drawn"]

LENGTHS = 6
"""Number of lengths without a given ``least``: as many as in the paper, 256 to 8,192."""

SEARCHED = 100_000
"""Consecutive documents without a long enough piece after which a row fails."""

_STEP, _SEED = (math.sqrt(5) - 1) / 2, math.sqrt(2)  # irrational: multiples spread evenly over 0..1


class LengthCurriculum(Plugin, api=1):
    """Every row is a piece of one document, a power of two long; short rows first, in cycles."""

    least: int | None = option(
        None, ge=1, help="tokens in the shortest rows, a power of two; none: 1/32 of the longest"
    )
    growth: float = option(
        2.0,
        ge=1,
        le=100,
        help="odds of each length relative to its double at a cycle's start; 1: no curriculum",
    )
    cycles: int = option(
        8, ge=1, search=(4, 8, 16), help="number of cycles in which rows grow from short to long"
    )
    buffer: int = option(
        1000, ge=1, le=32_768, help="maximum number of pieces that wait for a step of their length"
    )

    def build_data(self, data):
        longest = 1 << (data.seq_len.bit_length() - 1)
        least = self.least or max(longest >> (LENGTHS - 1), min(2, longest))
        if least & (least - 1) or least > longest:
            raise PlanError(
                f"length_curriculum.least={least} is not a power of two up to {longest}",
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
    """Draw the index of a step's row length, 0 the shortest.

    Args:
        step: the step, from 1.
        steps: steps of the run.
        seed: data.seed.
        lengths: number of lengths.
        growth: odds of a length over the next longer one at the start of a cycle, inverted at its end.
        cycles: cycles in the run.
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
    """A packer of rows of one piece each, of ``capacity - 1`` tokens: a power of two.

    ``pending`` is sorted by size, the oldest of a size last. Its pieces have power-of-two lengths from
    ``least`` to the longest; only the rest of a document that is longer still stays one piece.

    Args:
        capacity: tokens of the longest rows, or more.
        least: tokens of the shortest piece.
        buffer: maximum number of pending pieces; the pieces of the last document may exceed it.
    """

    any_capacity = True

    def __init__(self, capacity: int, least: int, buffer: int) -> None:
        super().__init__(capacity)
        self.least, self.longest = least, 1 << ((capacity - 1).bit_length() - 1)
        self.buffer = buffer
        self._waiting = BySize(self.pending)

    def row(self, take: Callable[[], Piece]) -> list[Piece]:
        """Return the next row: the oldest pending piece of the row's length.

        Raises:
            DataError: a hundred thousand consecutive documents have no piece of that length.
        """
        if self._waiting.pieces is not self.pending:  # replaced when a run resumes
            self._waiting = BySize(self.pending)
        length, taken, waiting = self.capacity - 1, 0, self._waiting
        while True:
            place = waiting.up_to(length)
            if place and waiting.size(place - 1) == length:
                return [waiting.pop(place - 1)]
            if place < len(waiting) and (length == self.longest or len(waiting) >= self.buffer):
                self._divide(waiting.pop(waiting.up_to(waiting.size(place)) - 1))
            elif len(waiting) >= self.buffer:
                waiting.pop(0)  # the shortest piece, which is counted as cut
            elif taken == SEARCHED:
                raise DataError(
                    f"{taken:,} consecutive documents are shorter than the {length:,} tokens of a row",
                    where="length_curriculum",
                    fix=f"a train.seq_len below {length:,}, or longer documents",
                )
            else:
                taken += 1
                self._add(take())

    def _divide(self, piece: Piece) -> None:
        """Halve a piece; split one longer than the longest row as :meth:`_add` does."""
        first, last = piece
        if last - first > self.longest:
            self._add(piece)
        else:
            half = first + (last - first) // 2
            self._waiting.add(first, half)
            self._waiting.add(half, last)

    def _add(self, piece: Piece) -> None:
        """Cut a document, or the rest of one, into powers of two; keep a long rest as one piece for later."""
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
