"""Rows: documents with their source lines, so that kept rows are written byte for byte."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from minillm_core import DataError
from minillm_core.documents import (
    MAX_LINE_BYTES,
    Continued,
    Document,
    MalformedError,
    Place,
    Progress,
    Reading,
    Record,
    Source,
    documents_of,
)
from minillm_data.files import Files

CHATS = ("messages", "conversations", "prompt")
"""The keys of the forms of chats."""

NO_WORDS = "left out: chats whose messages hold no text"


@dataclass(frozen=True)
class Row:
    """A document of the data.

    Attributes:
        line: the JSON object to write where the row is kept, one line with its LF.
        record: the parsed object.
        where: its file and line, for messages.
        messages: those of a chat, unvalidated; None: a text or ids.
    """

    line: bytes
    record: dict[str, Any] = field(repr=False)
    where: str
    messages: list[Any] | None = field(default=None, repr=False)

    @cached_property
    def text(self) -> str | None:
        """The text: "text", or the contents of a chat's messages, one per line; None where there are ids.

        Of a line with both, training reads the ids.
        """
        if self.messages is not None:
            return "\n".join(filter(None, map(_content, self.messages)))
        return None if "ids" in self.record else self.record["text"]

    @property
    def document(self) -> Document:
        """The text, or the ids."""
        return np.array(self.record["ids"], np.uint32) if self.text is None else self.text


def text_of(row: Row, what: str, fix: str) -> str:
    """Return a row's text.

    Raises:
        DataError: the row holds ids; ``what`` and ``fix`` are the error's message and fix.
    """
    if row.text is None:
        if "text" in row.record:
            fix = f'take "ids" out of the lines to have "text" read, also in training; or {fix}'
        raise DataError(what, where=row.where, fix=fix)
    return row.text


@dataclass
class Rows(Files):
    """The rows of files, in order; a re-iterable.

    Attributes:
        notes: after an iteration, counts of skipped documents by reason: "left out: not UTF-8".
    """

    no_shards = ("token shards hold no rows", "give the text that they were made from")

    notes: Counter[str] = field(default_factory=Counter, init=False)

    def __iter__(self) -> Iterator[Row]:
        return self.read("reading")

    def read(self, what: str, progress: Progress | None = None) -> Iterator[Row]:
        """Read every row.

        Args:
            what: the name of the work, for its progress.
            progress: called with ``what``, the bytes read and the total.

        Raises:
            DataError: a file cannot be read, or a document where ``malformed`` is strict; names
                file, line and byte.
        """
        reading = self.reading(what, progress)
        self.notes = reading.notes
        for source in self.sources:
            if source.format.records is not None:
                yield from rows_of(source, source.format.records, reading)
            else:
                yield from self._texts(source, reading)
            source.check_unchanged()

    def _texts(self, source: Source, reading: Reading) -> Iterator[Row]:
        """Read the documents of a file that has no lines; the size limit is that of a line of JSON."""
        assert source.format.read is not None
        pieces: list[str] = []
        size, number = 0, 0

        def row() -> Row:
            return _row({"text": "".join(pieces)}, source, number)

        try:
            for document in source.format.read(source.path, source.packing, reading):
                if not isinstance(document, Continued):
                    if pieces:
                        yield row()
                    pieces, size, number = [], 0, number + 1
                if not isinstance(document, str):
                    yield _row({"ids": document.tolist()}, source, number)
                    continue
                pieces.append(document)
                size += len(document)
                if size > MAX_LINE_BYTES:
                    raise MalformedError(
                        f"a text longer than {MAX_LINE_BYTES >> 20} MiB",
                        where=str(source.path),
                        fix="divide it into documents, one JSON object a line",
                    )
        except MalformedError as error:
            reading.malformed(error)
            return
        if pieces:
            yield row()


def _row(content: dict[str, Any], source: Source, number: int) -> Row:
    record = {**content, "source": str(source.path)}
    line = json.dumps(record, ensure_ascii=False).encode("utf-8") + b"\n"
    return Row(line, record, f"{source.path}, document {number}")


def rows_of(
    source: Source, records: Callable[[Path, str, Reading], Iterator[Record]], reading: Reading
) -> Iterator[Row]:
    """Yield the row of each record of a file: its ids, its text, or its chat."""
    for place, line, record in records(source.path, source.packing, reading):
        line = line if line.endswith(b"\n") else line + b"\n"
        try:
            messages = _messages(record, place)
        except MalformedError as error:
            reading.malformed(error)
            continue
        row = Row(line, record, place.name(), messages)
        if messages is not None and not row.text:
            reading.notes[NO_WORDS] += 1
            continue
        as_read = record if messages is None else {"text": row.text}
        yield from (row for _ in documents_of([(place, line, as_read)], reading))


def _messages(record: dict[str, Any], place: Place) -> list[Any] | None:
    """Return the messages of a chat in any of the forms that ``train --task sft`` reads; None: no chat.

    Raises:
        MalformedError: it has no messages.
    """
    if "ids" in record or record.get("text"):
        return None
    given = record.get("messages", record.get("conversations"))
    if given is None and "prompt" in record:
        turns = record["prompt"], record.get("completion", record.get("response"))
        listed = [turn if isinstance(turn, list) else [turn] for turn in turns]
        given = None if None in turns else [*listed[0], *listed[1]]
    if isinstance(given, list):
        return given
    if "text" not in record and not record.keys().isdisjoint(CHATS):
        what = 'a chat whose messages are no list, or a "prompt" without a "completion"'
        raise place.error(what, 'like {"messages": [{"role": "user", "content": "..."}]}')
    return None


def _content(message: Any) -> str:
    """Return the text of a message, or of a part of its content."""
    if isinstance(message, dict):
        keys = ("content", "value", "text")
        message = next((message[key] for key in keys if message.get(key) is not None), None)
    if isinstance(message, list):
        return "".join(map(_content, message))
    return message if isinstance(message, str) else ""
