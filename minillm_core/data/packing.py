"""Rows as a plugin's packer lays them out, from the documents of the stream."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minillm_core.data.documents import Arrangement
from minillm_core.data.stream import Batch, Stream, joined, pack
from minillm_core.errors import DataError
from minillm_core.plugins.packing import Packer, Piece
from minillm_core.text import plain

MOST = 1 << 20
"""Documents that a packer may take for one row."""

COUNTS = ("rows", "taken", "used", "cut", "split")
"""Of a run so far: rows; tokens taken, laid out, and cut; pieces that begin inside a document."""


class PackedRows:
    """The rows of a packer, one after the other, each checked.

    Args:
        stream: where documents are taken from.
        by: has the packer.
        seq_len: tokens of a row that the model reads.
        cursor: as :meth:`cursor` gave it; None: from the start.
    """

    def __init__(
        self, stream: Stream, by: Arrangement, seq_len: int, cursor: Mapping[str, Any] | None
    ) -> None:
        assert by.packer is not None
        self._stream, self._contained, self._length = stream, by.contained, seq_len + 1
        with self._contained("packer"):
            self._packer: Packer = by.packer(self._length)
        self._counts = dict.fromkeys(COUNTS, 0)
        if cursor is not None:
            self._counts = {**cursor["packed"]["counts"]}
            self._packer.pending = [Piece(*one) for one in cursor["packed"]["pending"]]
            self._packer.state = cursor["packed"]["state"]

    def read(self, rows: int) -> Batch:
        """Make a micro-batch of the next rows.

        A label is the token that follows in the text: -1 before a piece that begins inside a
        document, after one that ends inside it, and in padding, where ids are 0 and documents -1.

        Raises:
            DataError: the packer returned no row, or a file changed since it was opened.
        """
        with self._contained("packer"):
            laid = [self._checked() for _ in range(rows)]
        return joined([self._laid(row) for row in laid])

    def _laid(self, row: Sequence[Piece]) -> Batch:
        ids, starts = np.zeros(self._length, np.int32), np.zeros(self._length, bool)
        follows = np.zeros(self._length, bool)  # from the token before it, in the text
        at, before, whole = 0, -1, True
        for piece in row:
            end, continues = at + piece.tokens, piece.first == before
            found, begins = self._stream.at(piece.first, piece.tokens + 1)
            ids[at:end], starts[at:end], follows[at:end] = found[:-1], begins[:-1], True
            follows[at] = continues or (whole and begins[0])
            starts[at] |= not continues
            self._counts["split"] += not (continues or begins[0])
            at, before, whole = end, piece.last, begins[-1]
        made = pack(ids, starts, 1)
        made["labels"][0, ~follows[1:]] = -1
        made["documents"][0, at:] = -1
        return made

    def cursor(self) -> dict[str, Any]:
        """Return the place after the last row as JSON: the stream's, the packer's, and the counts.

        Raises:
            DataError: the packer's state is not JSON, or it used tokens that it did not have.
        """
        packer, counts = self._packer, self._counts
        with self._contained("packer"):
            try:
                kept = json.dumps([packer.pending, packer.state], allow_nan=False)
            except (TypeError, ValueError) as error:
                raise _wrong(f"keeps what is not JSON: {error}", "pending and state") from error
            pending, packer.state = json.loads(kept)  # as a resumed run will find it
            cut = counts["taken"] - counts["used"] - sum(last - first for first, last in pending)
            if cut < counts["cut"]:
                what = f"laid out {counts['cut'] - cut} tokens twice, or after they were cut"
                raise _wrong(what, "keep in pending what is for later rows, and nothing else")
        counts["cut"] = cut
        self._stream.forget(min((first for first, _ in pending), default=None))
        packed = {"pending": pending, "state": json.loads(kept)[1], "counts": {**counts}}
        return {**self._stream.cursor.data(), "packed": packed}

    def _checked(self) -> Sequence[Piece]:
        """Ask the packer for a row.

        Raises:
            DataError: it is none.
        """
        documents = 0

        def take() -> Piece:
            nonlocal documents
            documents += 1
            if documents > MOST:
                raise _wrong(f"took {MOST:,} documents for one row", "return a row")
            piece = self._stream.take()
            self._counts["taken"] += piece.tokens
            return piece

        row = self._packer.row(take)
        if not isinstance(row, (list, tuple)) or not row:
            raise _wrong(f"returned {plain(repr(row), 60)}", "return a list, with a piece at least")
        for piece in row:
            if (
                not isinstance(piece, Piece)
                or not 0 <= piece.first < piece.last <= self._stream.position
            ):
                what = f"returned {plain(repr(piece), 80)}, no piece of a document that it took"
                raise _wrong(what, "return pieces that take() gave, or parts of them")
        if (tokens := sum(piece.tokens for piece in row)) > self._length:
            what = f"returned a row of {tokens:,} tokens, where {self._length:,} have room"
            raise _wrong(what, "fill a row up to self.capacity")
        self._counts["rows"] += 1
        self._counts["used"] += tokens
        return row


def _wrong(what: str, fix: str) -> DataError:
    return DataError(f"the packer {what}", fix=fix)
