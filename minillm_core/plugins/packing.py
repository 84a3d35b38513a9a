"""What a packer works with: pieces of documents, of which it makes rows. It never sees an id."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple


class Piece(NamedTuple):
    """A document, or a part of one, by its place in the endless stream of all epochs' documents."""

    first: int  # its first token, counted from the beginning of the stream
    last: int  # one past its last token

    @property
    def tokens(self) -> int:
        """How many there are."""
        return self.last - self.first

    def part(self, first: int, last: int) -> Piece:
        """Return the tokens from ``first`` up to ``last``, counted within the piece, where it has them."""
        return Piece(self.first + first, min(self.first + last, self.last))


class Packer:
    """Base of packers: what decides which documents lie together in a row.

    A run makes one packer and asks it for every row in turn, in the loader's thread. It takes whole
    documents from an endless stream, in the order of each epoch, and lays out pieces of them. A
    token that is neither in a row nor in ``pending`` is cut: no later row has it, and the run counts
    it. ``pending`` and ``state`` are all that a packer may remember from row to row: checkpoints
    hold them, and a resumed run puts them back. Random numbers of its own would not be.

    Attributes:
        capacity: tokens that a row has room for: train.seq_len, and one more, which is only a label.
        any_capacity: of the class: ``capacity`` may be another for the next row. Without it, a run
            whose rows change their length (train.stages, ``data.shapes``) is refused.
        pending: pieces that were taken, for later rows.
        state: what else it remembers, as JSON.
    """

    any_capacity: ClassVar[bool] = False

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.pending: list[Piece] = []
        self.state: Any = None

    def row(self, take: Callable[[], Piece]) -> Sequence[Piece]:
        """Return the pieces of the next row, one at least, of ``capacity`` tokens together at most.

        Args:
            take: takes the next document of the stream, whole.
        """
        raise NotImplementedError
