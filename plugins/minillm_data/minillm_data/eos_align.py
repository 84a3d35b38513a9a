"""Rows that begin where a document begins, as in the modded-nanogpt speed records.

In rows laid end to end most rows begin inside a document, and its first tokens there are predicted
without what they refer to. Here every row begins with a document's first token (the end-of-text id,
which stands before a document), is filled by the documents that follow, and the last of them is cut
at the row's end.

What it costs: what is cut is not trained on in that epoch, with long documents a large
share of the text; there is never any padding. Another epoch has another order, and cuts elsewhere.
``max_document`` lets a row hold several documents where one would fill it, and cuts more.
The run's last lines count what was cut.
"""

from __future__ import annotations

from collections.abc import Callable

from minillm_core import Packer, Piece, PlanError, Plugin, option

__all__ = ["EosAlign", "EosAlignPacker"]


class EosAlign(Plugin, api=1):
    """Every row begins where a document begins; documents are cut at a length and at the row's end."""

    max_document: int | None = option(
        None, ge=1, help="tokens of a document that are kept; none: as many as a row holds"
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
    """Rows of documents in their order; each begins a row or follows another, and is cut at its end.

    Args:
        capacity: tokens of a row.
        max_document: tokens of a document that are kept.
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
