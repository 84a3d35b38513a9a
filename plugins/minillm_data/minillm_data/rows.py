"""Rows: documents with their source lines, so that kept rows are written byte for byte."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
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
        line: the JSON object to write if the row is kept, one line with its LF.
        record: the parsed object.
        where: its file and line, for messages.
        messages: those of a chat, unvalidated, with its "system" as the first; None: a text or ids.
    """

    line: bytes
    record: dict[str, Any] = field(repr=False)
    where: str
    messages: list[Any] | None = field(default=None, repr=False)

    @cached_property
    def text(self) -> str | None:
        """The text: "text", or the contents of a chat's messages, one per line; None if there are ids.

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
                rows = rows_of(source, source.format.records, reading)
            else:
                rows = self._texts(source, reading)
            yield from _writable(rows, reading)
            source.check_unchanged()

    def _texts(self, source: Source, reading: Reading) -> Iterator[Row]:
        """Read the documents of a file that has no lines."""
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
                    raise _too_long(str(source.path))
        except MalformedError as error:
            reading.malformed(error)
            return
        if pieces:
            yield row()


def _row(content: dict[str, Any], source: Source, number: int) -> Row:
    record = {**content, "source": str(source.path)}
    return Row(json_line(record), record, f"{source.path}, document {number}")


def _writable(rows: Iterable[Row], reading: Reading) -> Iterator[Row]:
    """Yield the rows whose lines can be read again, and report the longer ones as malformed."""
    for row in rows:
        if len(row.line) > MAX_LINE_BYTES:
            reading.malformed(_too_long(row.where))
        else:
            yield row


def _too_long(where: str) -> MalformedError:
    return MalformedError(
        f"a document longer than {MAX_LINE_BYTES >> 20} MiB as a line of JSON",
        where=where,
        fix="divide it into documents, one JSON object a line, or drop its large keys",
    )


def json_line(record: Mapping[str, Any]) -> bytes:
    """Write a record as a line of JSON with its LF.

    NaN and infinities become null; dates, decimals, bytes and other values that JSON lacks become text.
    """
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False, default=str)
    except ValueError:
        text = json.dumps(_finite(record), ensure_ascii=False, allow_nan=False, default=str)
    # what UTF-8 lacks is a lone surrogate, and its Python escape is that of JSON
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _finite(value: Any) -> Any:
    """Replace floats that are not finite by None, at any depth."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
    given = _first(record, "messages", "conversations")
    if given is None and "prompt" in record:
        turns = record["prompt"], _first(record, "completion", "response")
        listed = [turn if isinstance(turn, list) else [turn] for turn in turns]
        given = None if None in turns else [*listed[0], *listed[1]]
    if isinstance(given, list):
        return [*_system(record.get("system"), given), *given]
    if "text" not in record and not record.keys().isdisjoint(CHATS):
        what = 'a chat whose messages are not a list, or a "prompt" without a "completion"'
        raise place.error(what, 'like {"messages": [{"role": "user", "content": "..."}]}')
    return None


def _system(content: Any, messages: list[Any]) -> list[dict[str, Any]]:
    """Return the system message that a chat has beside its messages, if these have none."""
    if not (messages and isinstance(content, str) and content.strip()):
        return []
    roles = [_first(one, "role", "from") for one in messages if isinstance(one, dict)]
    instructed = "system" in roles or "developer" in roles
    return [] if instructed else [{"role": "system", "content": content}]


def _first(record: Mapping[str, Any], *keys: str) -> Any:
    """Return the value of the first key that is there and not null; None: there is none."""
    return next((record[key] for key in keys if record.get(key) is not None), None)


def _content(message: Any) -> str:
    """Return the text of a message, or of a part of its content."""
    if isinstance(message, dict):
        message = _first(message, "content", "value", "text")
    if isinstance(message, list):
        return "".join(map(_content, message))
    return message if isinstance(message, str) else ""
