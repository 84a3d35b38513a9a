"""EOS-aligned packing: every row begins at a document's start, as in the modded-nanogpt speed records.

With plain concatenation most rows begin inside a document, and their first tokens are predicted
without the context they refer to. Here every row begins with a document's first token (the end-of-text
id that begins each document) and continues with the following documents; the last one is cut at the
row's end.

Cost: cut tokens are not trained on in that epoch; with long documents they are a large share of the
text. There is never any padding. The next epoch has another order, and other cuts. ``max_document``
lets several documents share a row that one would fill, and cuts more. The run's last lines count the
cut tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from minillm_core import Packer, Piece, PlanError, Plugin, option

__all__ = ["EosAlign", "EosAlignPacker"]


class EosAlign(Plugin, api=1):
    """Every row begins where a document begins; documents are cut at a length and at the row's end."""

    max_document: int | None = option(
        None,
        ge=2,
        help="maximum number of tokens of a document, the rest is cut; none: a row's length",
    )

    def build_data(self, data):
        longest = data.seq_len + 1
        if self.max_document is not None and self.max_document >= longest:
            raise PlanError(
                f"eos_align.max_document={self.max_document} cuts nothing: no row has room for more than "
                f"{longest} tokens",
                where=f"train.seq_len={data.seq_len}",
                fix=f"a number below {longest}, or leave it out",
            )
        data.packer(EosAlignPacker, max_document=self.max_document or longest)


class EosAlignPacker(Packer):
    """A packer of documents in order, that cuts each at ``max_document`` tokens and at the row's end.

    Args:
        capacity: tokens of a row.
        max_document: maximum tokens kept per document.
    """

    any_capacity = True

    def __init__(self, capacity: int, max_document: int) -> None:
        super().__init__(capacity)
        self.max_document = max_document

    def row(self, take: Callable[[], Piece]) -> list[Piece]:
        """Return the next row, which is always full."""
        row, room = [], self.capacity
        while room:
            row.append(take().part(0, min(room, self.max_document)))
            room -= row[-1].tokens
        return row
