"""Rows: documents with their source lines, so that kept rows are written byte for byte."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from minillm_core import DataError
from minillm_core.documents import (
    EMPTY,
    MAX_LINE_BYTES,
    Continued,
    MalformedError,
    Progress,
    Reading,
    Record,
    Source,
)
from minillm_data.files import ANY, Files


@dataclass(frozen=True)
class Row:
    """A document of the data.

    Attributes:
        line: the JSON object to write where the row is kept, one line with its LF.
        record: the parsed object.
        where: its file and line, for messages.
    """

    line: bytes
    record: dict[str, Any] = field(repr=False)
    where: str

    @cached_property
    def text(self) -> str | None:
        """The text: "text", or the contents of a chat's messages, one per line; None where there are ids.

        Of a line with both, training reads the ids.
        """
        if "ids" in self.record:
            return None
        text = self.record.get("text")
        return text if isinstance(text, str) else _chat(self.record)


def text_of(row: Row, what: str, fix: str) -> str:
    """Return a row's text.

    Raises:
        DataError: the row holds ids; ``what`` and ``fix`` are the error's message and fix.
    """
    if row.text is None:
        raise DataError(what, where=row.where, fix=fix)
    return row.text


def messages_of(record: dict[str, Any]) -> Any:
    """Return a chat's messages, unvalidated; None where there are none."""
    return record.get("messages", record.get("conversations"))


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
                yield from self._records(source, source.format.records, reading)
            else:
                yield from self._texts(source, reading)
            source.check_unchanged()

    def _records(
        self,
        source: Source,
        read: Callable[[Path, str, Reading], Iterator[Record]],
        reading: Reading,
    ) -> Iterator[Row]:
        for place, line, record in read(source.path, source.packing, reading):
            row = Row(line if line.endswith(b"\n") else line + b"\n", record, place.name())
            try:
                if row.text is not None:
                    row.text.encode("utf-8")
            except UnicodeEncodeError:
                what = '"text" holds a lone surrogate'
                reading.malformed(place.error(what, "write the character whole, or drop the line"))
                continue
            ids = record.get("ids")
            if row.text is None and not isinstance(ids, list):
                what = 'an object without "text", "messages" or "ids"'
                reading.malformed(place.error(what, 'name the document\'s key "text"'))
            elif row.text is None and not all(type(i) is int and 0 <= i < ANY for i in ids or ()):
                what = '"ids" is not a list of integers that are ids'
                reading.malformed(place.error(what, 'like {"ids": [1, 2, 3]}, below 2^32'))
            elif not (ids if row.text is None else row.text):
                self.notes[EMPTY] += 1
            else:
                if ids is not None and "text" in record:
                    self.notes['left out: "text" of lines with "ids"'] += 1
                yield row

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


def _chat(record: dict[str, Any]) -> str | None:
    messages = messages_of(record)
    if not isinstance(messages, list):
        return None
    contents = [one.get("content") for one in messages if isinstance(one, dict)]
    return "\n".join(content for content in contents if isinstance(content, str))
