"""The endless token stream of a dataset, and the rows that are cut from it or laid out by a packer."""

from __future__ import annotations

import copy
import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from minillm_core.data.documents import (
    IDS,
    PLAIN,
    Arrangement,
    Blocked,
    Columns,
    Cursor,
    Documents,
    Stretches,
    check_cursor,
    claimed_order,
    fingerprint,
    permutation,
)
from minillm_core.errors import DataError
from minillm_core.nn.reference import Function
from minillm_core.plugins.sourcing import TARGET, WEIGHTS, Packer, Piece
from minillm_core.plugins.watch import running
from minillm_core.text import plain

Batch = dict[str, np.ndarray]
"""ids, labels, documents, positions: int32 (rows, T), C-contiguous; and fields added by on_batch."""


class OrderedBlock(NamedTuple):
    """A block of an epoch's documents, in the epoch's order.

    Attributes:
        epoch: from 0.
        number: index of the block in the epoch; documents without blocks are one block.
        first: position of its first token in the stream.
        end: one past its last token.
        before: number of documents of the epoch before it.
        documents: in order.
    """

    epoch: int
    number: int
    first: int
    end: int
    before: int
    documents: Documents


class Stream:
    """An endless stream of a dataset's tokens, read forward from a cursor.

    It joins the documents of every epoch end to end, without a gap between epochs. Documents in blocks are
    shuffled within each block, and the blocks stay in order; a block that is not tokenised yet is waited for.

    Args:
        documents: at least one token in all.
        seed: of the order.
        cursor: the place to begin.
        by: sets each epoch's order.

    Raises:
        DataError: the cursor is not valid for these documents.
    """

    def __init__(
        self, documents: Blocked, seed: int, cursor: Cursor, by: Arrangement = PLAIN
    ) -> None:
        self.documents, self._seed, self._by = documents, seed, by
        self._fingerprint = cursor.fingerprint
        self._tokens: int | None = None  # of an epoch, once its last block is known
        self._firsts, self._before = [0], [0]  # tokens and documents before each block, and in all
        self._laid: dict[tuple[int, int], OrderedBlock] = {}
        self._last: OrderedBlock | None = None  # the block of the last read
        self._ends: list[int] = []  # of the next documents, in reverse order
        self._taken = -1  # the end of the document before them
        self.position = self._place(cursor)  # of the next token

    @property
    def cursor(self) -> Cursor:
        """The place of the next token; equal places have equal cursors."""
        laid = self.block_at(self.position)
        document, offset = laid.documents.locate(self.position - laid.first)
        return Cursor(self._fingerprint, laid.epoch, laid.before + document, offset)

    def read(self, count: int) -> tuple[Columns, np.ndarray]:
        """Read the next ``count`` tokens, and one more without advancing past it.

        Returns:
            columns, (count + 1,) each; and starts bool (count + 1,): True where a document begins.
        """
        columns, starts = self.documents.room(count + 1), np.zeros(count + 1, bool)
        self.gather(Stretches.one(self.position, self.position + count + 1), columns, starts)
        self.position += count
        self.forget()
        return columns, starts

    def gather(self, stretches: Stretches, columns: Columns, starts: np.ndarray) -> None:
        """Copy stretches of the stream, see :meth:`Documents.gather`."""
        first, last, at = stretches
        position, end = int(first.min()), int(last.max())
        while position < end:
            laid = self.block_at(position)
            if len(inside := np.flatnonzero((first < laid.end) & (last > laid.first))):
                here = np.maximum(first[inside], laid.first)
                there = np.minimum(last[inside], laid.end)
                to = at[inside] + here - first[inside]
                mine = Stretches(here - laid.first, there - laid.first, to)
                laid.documents.gather(mine, columns, starts)
            position = laid.end

    def begins(self, positions: np.ndarray) -> np.ndarray:
        """Return whether a document begins at each position: bool, of the positions' shape, (n,)."""
        found, left = np.zeros(positions.shape, bool), np.arange(len(positions))
        while len(left):
            laid = self.block_at(int(positions[left].min()))
            here = positions[left] < laid.end
            offsets, places = laid.documents.offsets, positions[left[here]] - laid.first
            found[left[here]] = offsets[np.searchsorted(offsets, places)] == places
            left = left[~here]
        return found

    def take(self) -> Piece:
        """Take the whole document that begins here."""
        first = self.position
        if not self._ends or self._taken != first:
            laid = self.block_at(first)
            after = laid.documents.locate(first - laid.first)[0] + 1
            self._ends = (laid.documents.offsets[after : after + AHEAD] + laid.first)[::-1].tolist()
        self.position = self._taken = self._ends.pop()
        return Piece(first, self.position)

    def forget(self, position: int | None = None) -> None:
        """Drop the orders of blocks that end before a position; None: the next token's."""
        at = self.position if position is None else position
        if any(one.end <= at for one in self._laid.values()):
            self._laid = {key: one for key, one in self._laid.items() if one.end > at}

    def block_at(self, position: int) -> OrderedBlock:
        """Return the block that holds a position."""
        if self._last and self._last.first <= position < self._last.end:
            return self._last
        while self._tokens is None and position >= self._firsts[-1]:
            self._look_further()
        epoch, place = divmod(position, self._tokens) if self._tokens else (0, position)
        number = bisect_right(self._firsts, place) - 1
        if (epoch, number) not in self._laid:
            block = self.documents.block(number)
            assert block is not None
            order = permutation(block.lengths, self._seed, epoch, self._by, number)
            first = epoch * (self._tokens or 0) + self._firsts[number]
            self._laid[epoch, number] = OrderedBlock(
                *(epoch, number, first, first + block.tokens, self._before[number]),
                block.ordered(order),
            )
        self._last = self._laid[epoch, number]
        return self._last

    def _look_further(self) -> None:
        """Find one more block, or that the last known one was the last of all."""
        block = self.documents.block(len(self._firsts) - 1)
        if block is not None:
            self._firsts.append(self._firsts[-1] + block.tokens)
            self._before.append(self._before[-1] + len(block))
            return
        self._tokens = self._firsts.pop()
        if not self._tokens:
            raise ValueError("a stream of no tokens")

    def _place(self, cursor: Cursor) -> int:
        """Return the position of a cursor."""
        while self._tokens is None and (cursor.epoch or cursor.document >= self._before[-1]):
            self._look_further()
        number = bisect_right(self._before, cursor.document) - 1
        if cursor.document < self._before[-1]:
            laid = self.block_at(cursor.epoch * (self._tokens or 0) + self._firsts[number])
            document = cursor.document - laid.before
            if cursor.offset < laid.documents.lengths[document]:
                return laid.first + int(laid.documents.offsets[document]) + cursor.offset
        raise DataError(
            "the data cursor points past the end of the data",
            where=f"epoch {cursor.epoch}, document {cursor.document}, token {cursor.offset}",
            fix="continue from another checkpoint",
        )


def overlapping(array: np.ndarray, rows: int) -> np.ndarray:
    """View (rows * T + 1,) as rows of T + 1, each beginning with the last element of the one before."""
    (step,) = array.strides
    length = (len(array) - 1) // rows
    return as_strided(array, (rows, length + 1), (length * step, step), writeable=False)


def pack(columns: Columns, starts: np.ndarray, follows: np.ndarray | None = None) -> Batch:
    """Pack one micro-batch.

    Args:
        columns: (rows, T + 1) each, the last token only as a label; ids are int32.
        starts: bool (rows, T + 1), True where a document begins.
        follows: bool (rows, T + 1), False where a token does not follow the one before; None: all do.

    Returns:
        ids, labels, documents, positions, each int32 (rows, T) and contiguous. documents numbers
        the documents within a row: 0 for the first, then 1, 2, ... positions is 0..T-1 in every row.
        Each further column, such as ``role``, gives ``role``, of the token, and ``target_role``, of the token
        after it, 0 where ``follows`` is False. ``weights`` gives only the latter; the label of a
        token of weight 0 is -1.
    """
    rows, length = len(starts), starts.shape[1] - 1
    begins = starts[:, :-1].copy()
    begins[:, 0] = False
    known = True if follows is None else follows[:, 1:]
    weighed = columns[WEIGHTS][:, 1:] > 0 if WEIGHTS in columns else True
    labels = np.where(known & weighed, columns[IDS][:, 1:], np.int32(-1))
    found: Columns = {IDS: columns[IDS][:, :-1].copy(), "labels": labels}
    for name in [one for one in columns if one != IDS]:
        ahead = np.where(known, columns[name][:, 1:], columns[name].dtype.type(0))
        own = {name: columns[name][:, :-1].copy(), TARGET + name: ahead}
        found |= {name: ahead} if name == WEIGHTS else own
    return {
        **found,
        "documents": np.cumsum(begins, axis=1, dtype=np.int32),
        "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
    }


def joined(parts: Sequence[Batch]) -> Batch:
    """Stack the rows of several batches."""
    return {name: np.concatenate([one[name] for one in parts]) for name in parts[0]}


AHEAD = 1 << 12
"""Number of documents whose ends are looked up together."""

MOST = 1 << 20
"""Most documents that a packer may take for one row."""

COUNTS = ("room", "taken", "used", "cut", "split")
"""Counts of a run so far: tokens that its rows have room for; tokens taken, laid out, and cut; pieces that
begin inside a document."""


class PlainRows:
    """Rows of a stream whose documents are joined end to end, each row beginning where the one before ends."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def read(self, rows: int, seq_len: int) -> Batch:
        """Return a micro-batch of the next rows, of ``seq_len`` tokens each.

        Raises:
            DataError: a file changed since it was opened.
        """
        columns, starts = self._stream.read(rows * seq_len)
        laid = {name: overlapping(array, rows) for name, array in columns.items()}
        return pack(laid, overlapping(starts, rows))

    def cursor(self) -> dict[str, Any]:
        """Return the place after the last row as JSON."""
        return self._stream.cursor.data()


class WindowRows(PlainRows):
    """Rows that read the windows of a stream in an order that a plugin claims.

    The stream is cut at each multiple of ``size`` tokens. The windows within one block of an epoch are
    permuted; a window across a boundary stays, so that an epoch reads every token once. Rows of other
    lengths read the windows one after the other; where one ends within a row, its last label is -1.

    Args:
        stream: the stream, whose position counts the tokens read.
        claimed: returns the order of an epoch's windows.
        size: tokens of a window.
        seed: of the order.
    """

    def __init__(self, stream: Stream, claimed: Function, size: int, seed: int) -> None:
        super().__init__(stream)
        self._claimed, self._size, self._seed = claimed, size, seed
        self._orders: dict[tuple[int, int], np.ndarray] = {}  # epoch and block -> order

    def read(self, rows: int, seq_len: int) -> Batch:
        """Return a micro-batch of the next rows, of ``seq_len`` tokens each.

        Raises:
            PluginCodeError: the plugin returned no permutation.
            DataError: a file changed since it was opened.
        """
        stream, size, length = self._stream, self._size, seq_len + 1
        pieces: list[tuple[int, int, int]] = []  # stretches, one by one
        for row in range(rows):
            filled = 0
            while filled < seq_len:
                window, offset = divmod(stream.position, size)
                count = min(size - offset, seq_len - filled)
                first = self._place(window) * size + offset
                place = row * length + filled
                filled, stream.position = filled + count, stream.position + count
                pieces.append((first, first + count + (filled == seq_len), place))
        stretches = Stretches(*np.array(pieces).T)
        columns, starts = stream.documents.room(rows * length), np.zeros(rows * length, bool)
        stream.gather(stretches, columns, starts)
        follows = np.ones(rows * length, bool)
        follows[stretches.at], starts[stretches.at] = False, True
        stream.forget()
        laid = {name: array.reshape(rows, length) for name, array in columns.items()}
        return pack(laid, starts.reshape(rows, length), follows.reshape(rows, length))

    def _place(self, window: int) -> int:
        """Return the index of the stream's window that is read at index ``window``."""
        size = self._size
        laid = self._stream.block_at(window * size)
        first, end = -(-laid.first // size), laid.end // size
        if not first <= window < end:
            return window
        if (key := (laid.epoch, laid.number)) not in self._orders:
            count = end - first
            order = claimed_order(self._claimed, count, count, self._seed, laid.epoch, "rows")
            self._orders = {key: order}
        return first + int(self._orders[key][window - first])


class PackedRows:
    """The rows of a packer, one after the other, each validated.

    Args:
        stream: the source of the documents.
        claimed: the packer.
        cursor: from :meth:`cursor`; None: from the start.
    """

    def __init__(self, stream: Stream, claimed: Function, cursor: Mapping[str, Any] | None) -> None:
        self._stream, self._claimed, self._length = stream, claimed, 0
        self._packer: Packer = claimed.call()
        self._counts, self._documents = dict.fromkeys(COUNTS, 0), 0
        if cursor is not None:
            packed = cursor["packed"]
            self._counts, self._packer.state = {**packed["counts"]}, packed["state"]
            self._packer.pending = [Piece(*one) for one in packed["pending"]]

    def read(self, rows: int, seq_len: int) -> Batch:
        """Return a micro-batch of the next rows, of ``seq_len`` tokens each.

        A label is the token that follows in the text: -1 before a piece that begins inside a document, after one
        that ends inside it, and in padding, where ids are 0 and documents -1. A row filled with ``seq_len``
        tokens, one less than the packer's capacity, has its last label too.

        Raises:
            PluginCodeError: the packer returned no valid row.
            DataError: a file changed since it was opened.
        """
        self._length = self._packer.capacity = seq_len + 1
        with running(f"data.packer of plugin '{self._claimed.owner}'"):
            laid = [self._checked() for _ in range(rows)]
        return self._laid(laid)

    def cursor(self) -> dict[str, Any]:
        """Return the place after the last row as JSON: the stream's, the packer's, and the counts.

        Raises:
            PluginCodeError: the packer's state is not JSON, or it used tokens that were not offered.
        """
        packer, counts, broken = self._packer, self._counts, self._claimed.broken
        try:
            places = [*chain.from_iterable(packer.pending)]
            if not ({*map(type, places)} <= {int} and {*map(len, packer.pending)} <= {2}):
                raise TypeError("a piece is two whole numbers")  # as JSON has them
            held = sum(places[1::2]) - sum(places[::2])
            state = json.loads(json.dumps(packer.state, allow_nan=False))
        except (TypeError, ValueError) as error:
            what = f"pending and state cannot be kept: {error}"
            raise broken(what, "pieces in pending, JSON in state") from error
        packer.state = copy.deepcopy(state)  # equal to the state after a resume
        cut = counts["taken"] - counts["used"] - held
        if cut < counts["cut"]:
            what = f"{counts['cut'] - cut} tokens were laid out twice, or after they were cut"
            raise broken(what, "keep in pending only what is for later rows")
        counts["cut"] = cut
        self._stream.forget(min(places[::2], default=None))
        pending = [*map(list, packer.pending)]
        packed = {"pending": pending, "state": state, "counts": {**counts}}
        return {**self._stream.cursor.data(), "packed": packed}

    def _laid(self, laid: Sequence[Sequence[Piece]]) -> Batch:
        """Lay out the pieces of all rows."""
        rows, length, stream = len(laid), self._length, self._stream
        counts = np.array([len(row) for row in laid])
        places = np.fromiter(chain.from_iterable(chain.from_iterable(laid)), np.int64)
        first, last = places.reshape(-1, 2).T
        row = np.repeat(np.arange(rows), counts)
        opening = np.cumsum(counts) - counts  # the first piece of each row
        behind = np.cumsum(last - first)
        used = behind[opening + counts - 1] - behind[opening] + (last - first)[opening]
        at = behind - (last - first) - (behind - (last - first))[opening][row] + row * length
        columns, starts = stream.documents.room(rows * length), np.zeros(rows * length, bool)
        stream.gather(Stretches(first, last, at), columns, starts)

        # follows: whether a token follows the one before it in the text
        continues, whole = np.zeros((2, len(first)), bool)
        continues[1:], whole[1:] = first[1:] == last[:-1], stream.begins(last[:-1])
        continues[opening], whole[opening] = False, True
        begins = starts[at]
        self._counts["split"] += int(np.count_nonzero(~(continues | begins)))
        follows = np.arange(length) < used[:, None]
        follows.reshape(-1)[at] = continues | (whole & begins)
        starts[at] |= ~continues
        full = np.flatnonzero(used == length - 1)  # their last label is the next token of the text
        if len(full):
            after = last[opening + counts - 1][full]
            ends = Stretches(after, after + 1, full * length + length - 1)
            stream.gather(ends, columns, starts)
            follows[full, -1] = True
        shaped = {name: array.reshape(rows, length) for name, array in columns.items()}
        made = pack(shaped, starts.reshape(rows, length), follows)
        made["documents"][np.arange(length - 1) >= used[:, None]] = -1
        return made

    def _checked(self) -> Sequence[Piece]:
        """Call the packer for a row, and validate it."""
        self._documents, broken, stream = 0, self._claimed.broken, self._stream
        row = self._packer.row(self._take)
        if not isinstance(row, (list, tuple)) or not row:
            raise broken(f"{plain(repr(row), 60)} is not a row", "a non-empty list of pieces")
        for one in row:
            known = isinstance(one, Piece) and isinstance(one[0], int) and isinstance(one[1], int)
            if not (known and 0 <= one[0] < one[1] <= stream.position):
                what = f"{plain(repr(one), 80)} is not a piece of a document that it took"
                fix = "return pieces that take() gave, or parts of them, by whole numbers"
                raise broken(what, fix)
        if (tokens := sum([last - first for first, last in row])) > self._length:
            what = f"a row of {tokens:,} tokens, but only {self._length:,} fit"
            raise broken(what, "fill a row up to self.capacity")
        self._counts["room"] += max(tokens, self._length - 1)  # the last one is only a label
        self._counts["used"] += tokens
        return row

    def _take(self) -> Piece:
        self._documents += 1
        if self._documents > MOST:
            raise self._claimed.broken(f"{MOST:,} documents were taken for one row", "return a row")
        piece = self._stream.take()
        self._counts["taken"] += piece[1] - piece[0]
        return piece


class MixedRows:
    """The rows of several sources in fixed proportions, each row of one source.

    After any number of rows each source has its share of them, to within one row.

    Args:
        sources: the rows of each.
        weights: of each, above 0.
        fingerprint: of the mixture.
        given: rows of each source so far.
    """

    def __init__(
        self,
        sources: Sequence[Rows],
        weights: Sequence[float],
        fingerprint: str,
        given: Sequence[int] | None = None,
    ) -> None:
        self._sources, self._fingerprint = sources, fingerprint
        self._shares, self._row = whole_shares(weights), [1] * len(sources)
        self._given = list(given or [0] * len(sources))

    def read(self, rows: int, seq_len: int) -> Batch:
        """Return a micro-batch of the next rows; its field ``source``, int32 (rows, T), is their source index."""
        turns = [self._next() for _ in range(rows)]
        chosen = [number for number in range(len(self._sources)) if number in turns]
        parts = [self._sources[number].read(turns.count(number), seq_len) for number in chosen]
        place = np.argsort(np.argsort(turns, kind="stable"))  # place of each turn's row in parts
        batch = {name: array[place] for name, array in joined(parts).items()}
        batch["source"] = np.repeat(np.array(turns, np.int32)[:, None], seq_len, axis=1)
        return batch

    def _next(self) -> int:
        number = next_source(self._shares, self._given, self._row)
        self._given[number] += 1
        return number

    def cursor(self) -> dict[str, Any]:
        """Return the place after the last row as JSON: that of each source, and the sums of their counts."""
        sources = [one.cursor() for one in self._sources]
        place: dict[str, Any] = {"fingerprint": self._fingerprint, "sources": sources}
        place["given"] = list(self._given)
        if all("packed" in one for one in sources):
            counts = [one["packed"]["counts"] for one in sources]
            place["packed"] = {"counts": {name: sum(c[name] for c in counts) for name in COUNTS}}
        return place


Rows = PlainRows | PackedRows | MixedRows
"""A reader of rows, from a cursor on."""


def whole_shares(weights: Iterable[float]) -> list[int]:
    """Convert weights to integers in exactly the same proportions.

    Sums of floats would depend on the machine.

    Args:
        weights: finite, above 0.
    """
    exact = [Fraction(weight) for weight in weights]
    unit = math.lcm(*(one.denominator for one in exact))
    return [int(one * unit) for one in exact]


def next_source(shares: Sequence[int], used: Sequence[int], sizes: Sequence[int]) -> int:
    """Choose the source of the next row or document.

    The rule is worst-case fair weighted fair queueing (Bennett and Zhang 1996): of the sources that are not
    ahead of their share, the one whose next row or document would end first. Each source's part of the whole
    is then its share to within about one item, after any number.

    Args:
        shares: of each source, in any unit, above 0.
        used: tokens, bytes or rows taken of each so far.
        sizes: sizes of the next row or document of each, in the same unit; above 0.

    Returns:
        The index of the source, the lowest in a tie. At least one source is not ahead, since the shares
        of what was taken add up to all of it.
    """
    whole, total = sum(shares), sum(used)
    behind = [i for i, n in enumerate(used) if n * whole <= shares[i] * total]
    return min(behind, key=lambda i: Fraction(used[i] + sizes[i], shares[i]))


def open_rows(
    documents: Blocked,
    seed: int,
    by: Arrangement = PLAIN,
    cursor: Mapping[str, Any] | None = None,
    parts: Sequence[tuple[float, Documents]] = (),
    *,
    size: int = 1,
) -> Rows:
    """Open the rows of documents: end to end, or arranged by plugins, or of a mixture.

    Args:
        documents: at least one token in all.
        seed: of their order.
        by: the order and packer that plugins claim.
        cursor: where an earlier reading stopped; None: from the start.
        parts: weight and documents of each source of a mixture; ``documents`` joins them.
        size: tokens of a window, if a plugin claims their order.

    Raises:
        DataError: the cursor does not match these documents in this order.
    """
    known = fingerprint(documents, seed, by)
    if not parts:
        start = Cursor.resume(cursor, known) if cursor is not None else Cursor(known)
        stream, packer = Stream(documents, seed, start, by), by.get("packer")
        if (windows := by.get("windows")) is not None:
            return WindowRows(stream, windows, size, seed)
        return PackedRows(stream, packer, cursor) if packer else PlainRows(stream)
    if cursor is not None:
        check_cursor(cursor, known)
    places, given = (cursor["sources"], cursor["given"]) if cursor else ([None] * len(parts), None)
    sources = [
        open_rows(part, seed, by, place, size=size)
        for (_, part), place in zip(parts, places, strict=True)
    ]
    return MixedRows(sources, [weight for weight, _ in parts], known, given)
