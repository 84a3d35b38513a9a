"""Source files: decompressed, and parsed as text, JSON lines or token shards.

A reader yields documents: a ``str``, or an int array of ids, which skips the tokenizer. Content that it
cannot read raises a DataError with file, line and byte.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import lzma
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, cast

import numpy as np

from minillm_core.data.cutting import PIECE, Continued, divide
from minillm_core.errors import DataError, PluginError
from minillm_core.install import pip_line
from minillm_core.plugins.discover import entry_points
from minillm_core.text import few

Progress = Callable[[str, int, int], None]
"""``progress(what, done, total)``, in bytes; total 0: unknown. Called at the start of a phase with
done 0, then several times a second, from one thread."""


def _zstd() -> Any:
    """Import zstandard: Python's own from 3.14 on, before that its backport.

    Raises:
        DataError: it is not installed.
    """
    try:
        return import_module("compression.zstd" if sys.version_info >= (3, 14) else _BACKPORT)
    except ModuleNotFoundError as error:
        what = "a .zst file needs another package to be read"
        raise DataError(what, where=_BACKPORT, fix=pip_line("minillm-core[zst]")) from error


def _damage() -> tuple[type[Exception], ...]:
    """Return the exceptions that decompressors raise for damaged or truncated files."""
    zstd = sys.modules.get("compression.zstd") or sys.modules.get(_BACKPORT)
    known = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
    return (*known, zstd.ZstdError) if zstd else known


PACKINGS: dict[str, Callable[[Any], io.BufferedIOBase]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".zst": lambda file: _zstd().open(file),
}
"""Suffix -> function that opens the decompressed file."""

_BUFFER = 1 << 18
_NOT_JSON = "not a line of JSON"
_BACKPORT = "backports.zstd"


def ticker(progress: Progress | None, what: str, total: int) -> Callable[[int], None]:
    """Begin a phase; return the function to call with each number of bytes done, or with 0."""
    if progress is None:
        return lambda count: None
    done = 0

    def tick(count: int) -> None:
        nonlocal done
        done += count
        progress(what, done, total)

    tick(0)
    return tick


class MalformedError(DataError):
    """A document that cannot be read, in a file that can be read further; ``reason`` is the kind of error."""

    def __init__(self, what: str, *, where: str, fix: str, reason: str | None = None) -> None:
        super().__init__(what, where=where, fix=fix)
        self.reason = reason or what


def _stop(error: MalformedError) -> None:
    raise error


@dataclass
class Reading:
    """The state of reading files: the bound of ids, progress, and notes.

    Attributes:
        vocab: upper bound of ids.
        tick: called with the number of bytes just read from a file.
        notes: "left out: blank lines", "cut: ..." -> count.
        malformed: called with the error of each unreadable document; it raises it, or returns to
            leave the document out.
    """

    vocab: int
    tick: Callable[[int], None] = lambda count: None
    notes: Counter[str] = field(default_factory=Counter)
    malformed: Callable[[MalformedError], None] = _stop


class _Counted(io.FileIO):
    """A file that reports the bytes that were read."""

    def __init__(self, path: Path, tick: Callable[[int], None]) -> None:
        super().__init__(path, "rb")
        self._tick = tick

    def readinto(self, buffer, /) -> int | None:
        count = super().readinto(buffer)
        self._tick(count or 0)
        return count


@contextmanager
def opened(path: Path, packing: str, reading: Reading) -> Iterator[io.BufferedReader]:
    """Open a source file for its decompressed bytes.

    Args:
        path: a regular file.
        packing: a key of PACKINGS, or empty for an uncompressed file.
        reading: its ``tick`` counts the bytes of the file itself.

    Raises:
        DataError: it cannot be opened, read or decompressed.
    """
    try:
        with io.BufferedReader(_Counted(path, reading.tick), _BUFFER) as raw:
            if packing:
                if not raw.peek(1):
                    raise EOFError("it is empty")  # gzip reads such a file as an empty text
                with PACKINGS[packing](raw) as unpacked:
                    yield io.BufferedReader(unpacked, _BUFFER)  # type: ignore[arg-type]
            else:
                yield cast("io.BufferedReader", raw)
    except _damage() as error:
        what = f"the {packing} file is damaged or cut short: {error}"
        raise DataError(what, where=str(path), fix="fetch or pack it again") from error
    except OSError as error:
        what = f"the file cannot be read: {error.strerror or error}"
        fix = "check that it exists and that you may read it"
        raise DataError(what, where=str(path), fix=fix) from error


Document = str | np.ndarray
Record = tuple["Place", bytes, dict[str, Any]]
"""A document's place, its raw line, and the parsed object."""

Reader = Callable[[Path, str, Reading], Iterator[Document]]

EMPTY = "left out: empty documents"
"""A note that needs no action."""

MAX_LINE_BYTES = 16 << 20
"""A longer line of JSON is refused before it fills the memory."""


@dataclass(frozen=True)
class Format:
    """A file format.

    Attributes:
        name: for messages.
        suffixes: of the files to read from a folder.
        read: path, packing and reading -> documents; None if files are mapped instead.
        records: the same -> places, lines and objects, for formats whose documents are objects.
        text: path -> approximate bytes of text; None: the size of the decompressed file.
        end_of_text: path -> the id that begins the file's documents; None: it states none.
    """

    name: str
    suffixes: tuple[str, ...]
    read: Reader | None
    records: Callable[[Path, str, Reading], Iterator[Record]] | None = None
    text: Callable[[Path], int] | None = None
    end_of_text: Callable[[Path], int | None] = lambda path: None


def read_text(path: Path, packing: str, reading: Reading) -> Iterator[str]:
    """Read the whole file as one document, without a byte order mark, with its own line ends.

    A file of more than PIECE bytes is read in pieces, so that its size is not bounded by the memory.
    """
    kind: type[str] = str
    text, undecoded, first, place, lines = "", b"", b"", 0, 0
    with opened(path, packing, reading) as file:
        while True:
            chunk = file.read(PIECE)
            data = undecoded + chunk
            if not place:
                first = data[:4]
                place = len(codecs.BOM_UTF8) if first.startswith(codecs.BOM_UTF8) else 0
                data = data[place:]
            try:
                decoded, count = codecs.utf_8_decode(data, "strict", not chunk)
            except UnicodeDecodeError as error:
                line = lines + data.count(b"\n", 0, error.start) + 1
                where = Place(path, packing, line, place).name(error.start)
                raise _not_utf8(first, error, where) from error
            text, undecoded = text + decoded, data[count:]
            place, lines = place + count, lines + data.count(b"\n", 0, count)
            if not chunk:
                break
            if file.peek(1):
                end = divide(text)
                yield kind(text[:end])
                kind, text = Continued, text[end:]
    if text:
        yield kind(text)
    elif kind is str:
        reading.notes[EMPTY] += 1


def read_records(path: Path, packing: str, reading: Reading) -> Iterator[Record]:
    """Read one JSON object a line; yield its place, its raw line, and the object."""
    with opened(path, packing, reading) as file:
        number, start = 0, 0
        while line := file.readline(MAX_LINE_BYTES + 1):  # only LF ends a line
            number += 1
            place = Place(path, packing, number, start)
            start += len(line)
            if len(line) > MAX_LINE_BYTES:
                what = f"a line longer than {MAX_LINE_BYTES >> 20} MiB"
                fix = "one JSON object per line; split the document or give it as a text file"
                reading.malformed(place.error(what, fix))
                while line and not line.endswith(b"\n"):
                    start += len(line := file.readline(_BUFFER))
            elif not line.strip():
                reading.notes["left out: blank lines"] += 1
            else:
                try:
                    record = _record(line, place)
                except MalformedError as error:
                    reading.malformed(error)
                else:
                    yield place, line, record


def read_jsonl(path: Path, packing: str, reading: Reading) -> Iterator[Document]:
    """Read one document a line: {"ids": [int, ...]}, else {"text": str}; other keys are ignored."""
    return documents_of(read_records(path, packing, reading), reading)


def documents_of(records: Iterable[Record], reading: Reading) -> Iterator[Document]:
    """Yield the document of each record: its "ids", or else its "text"."""
    for place, _, record in records:
        try:
            document = _document(record, place, reading)
        except MalformedError as error:
            reading.malformed(error)
            continue
        if len(document):
            yield document
        else:
            reading.notes[EMPTY] += 1


_TEXT_SUFFIXES = (
    *(".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".html"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".m", ".rs", ".go", ".java", ".kt"),
    *(".js", ".ts", ".css", ".sh", ".sql", ".r", ".jl", ".lua", ".rb", ".swift"),
)
TEXT = Format("text", _TEXT_SUFFIXES, read_text)
JSONL = Format("JSON lines", (".jsonl", ".ndjson"), read_jsonl, read_records)
SHARD = Format("token shard", (".bin",), None)

FORMATS: dict[str, Format] = {
    suffix: format for format in (TEXT, JSONL, SHARD) for suffix in format.suffixes
}
"""Suffix -> format; files of other suffixes are skipped in a folder; see :func:`~minillm_core.data.sources.find`
for those that are named."""

GROUP = "minillm.formats"
"""Entry points of further formats: the name is a suffix of file names, ``.parquet``; the value names a
:class:`Format`, which is imported when such a file is read."""


class Formats:
    """The file formats of the core and of installed distributions."""

    @cached_property
    def offers(self) -> list[EntryPoint]:
        """The entry points of further formats, listed once."""
        return list(entry_points(group=GROUP))

    def of(self, name: str) -> Format | None:
        """Find the format of a file by its name's suffix, before that of the packing; None: there is none.

        Raises:
            DataError: several distributions offer it.
            PluginError: the offered object is not a format.
        """
        own = FORMATS.get(Path(name).suffix.lower())
        if own in (TEXT, JSONL):
            return own
        offers = [one for one in self.offers if name.lower().endswith(one.name)]
        longest = max((len(one.name) for one in offers), default=0)
        offers = [one for one in offers if len(one.name) == longest]
        if not offers:
            return own
        if len({one.value for one in offers}) > 1:
            named = sorted(f"{one.value} ({one.dist and one.dist.name})" for one in offers)
            raise DataError(
                f"several distributions read {offers[0].name} files",
                where=", ".join(named),
                fix="uninstall the distribution that you do not need",
            )
        found = offers[0].load()
        if not isinstance(found, Format):
            raise PluginError(
                f"the format of {offers[0].name} files is not a minillm_core.documents.Format",
                where=offers[0].value,
                fix="tell the authors of the distribution",
            )
        return found


@dataclass(frozen=True)
class Place:
    """A line of a file, for messages."""

    path: Path
    packing: str
    line: int  # from 1
    start: int  # byte offset in the decompressed file

    def name(self, byte: int = 0) -> str:
        """Return the place of a byte of the line, for messages."""
        unpacked = " of the unpacked file" if self.packing else ""
        return f"{self.path}, line {self.line}, byte {self.start + byte}{unpacked}"

    def error(
        self, what: str, fix: str, byte: int = 0, reason: str | None = None
    ) -> MalformedError:
        """Build the error for a byte of the line; ``reason`` is its kind, by default ``what``."""
        return MalformedError(what, where=self.name(byte), fix=fix, reason=reason)


def _record(line: bytes, place: Place) -> dict[str, Any]:
    fix = 'write one object per line, {"text": "..."}; minillm data mix --malformed skip drops other lines'
    try:
        record = _DECODER.decode(text := line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _not_utf8(line, error, place.name(error.start)) from error
    except json.JSONDecodeError as error:
        # the bytes behind it, so that those of a byte order mark in front count
        byte = len(line) - len(text[error.pos :].encode("utf-8"))
        what = f"{_NOT_JSON}: {error.msg.removesuffix(' at').removesuffix(' starting')}"
        raise place.error(what, fix, byte, _NOT_JSON) from error
    except ValueError as error:
        what = f"{_NOT_JSON}: a number of thousands of digits"
        raise place.error(what, fix, 0, _NOT_JSON) from error
    except RecursionError as error:
        raise place.error(f"{_NOT_JSON}: nested too deeply", fix, 0, _NOT_JSON) from error
    if not isinstance(record, dict):
        raise place.error(f"{_kind(record)} instead of a JSON object", fix)
    return record


def _document(record: dict[str, Any], place: Place, reading: Reading) -> Document:
    if "ids" in record:
        return _ids(record, place, reading)
    if "text" not in record:
        if chat := {"messages", "conversations", "prompt"} & record.keys():
            raise place.error(
                f'chat data: "{min(chat)}", and neither "text" nor "ids"',
                "train on its answers with --task sft, evaluate them with --chats",
                reason="chat data, which --task sft trains on",
            )
        what, fix = 'an object with neither "text" nor "ids"', 'name the document\'s key "text"'
        has = few([repr(key[:40]) for key in record], 8) or "no key"
        raise place.error(f"{what}: it has {has}", fix, reason=what)
    text = record["text"]
    if not isinstance(text, str):
        fix = "drop the document" if text is None else "quote it, or drop the document"
        raise place.error(f'"text" is {_kind(text)}, not a string', fix)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise place.error(
            f'"text" holds a lone surrogate, U+{ord(text[error.start]):04X}, at its character '
            f"{error.start}",
            "write the character whole, or drop it",
            reason='"text" holds a lone surrogate',
        ) from error
    return text


def _ids(record: dict[str, Any], place: Place, reading: Reading) -> np.ndarray:
    ids = record["ids"]
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise place.error('"ids" is not a list of integers', 'like {"ids": [1, 2, 3]}')
    if ids and not (min(ids) >= 0 and max(ids) < reading.vocab):
        index = next(n for n, i in enumerate(ids) if not 0 <= i < reading.vocab)
        value = str(ids[index])
        raise place.error(
            f"id {value if len(value) < 24 else value[:20] + '...'} at index {index} is outside "
            f"0 <= id < model.vocab={reading.vocab}",
            "use the tokenizer that the ids were made with, and a model.vocab that holds it",
            reason="an id outside the vocabulary",
        )
    for key in filter(record.__contains__, ("labels", "text")):
        reading.notes[f'left out: "{key}" of lines with "ids"'] += 1
    return np.array(ids, np.uint32)


def _not_utf8(data: bytes, error: UnicodeDecodeError, where: str) -> MalformedError:
    what = f"not UTF-8: byte 0x{error.object[error.start]:02x}, {error.reason}"
    fix = "save it as UTF-8, or remove the file"
    if data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        what, fix = f"{what} (it looks like UTF-16)", "save it as UTF-8"
    return MalformedError(what, where=where, fix=fix, reason="not UTF-8")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise json.JSONDecodeError(f"the key {twice[:40]!r} occurs twice", "", 0)
    return record


def _no_constant(name: str) -> None:
    raise json.JSONDecodeError(f"{name} is not JSON", "", 0)


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


def _kind(value: Any) -> str:
    kinds = {type(None): "null", bool: "a boolean", list: "a list", dict: "an object"}
    return kinds.get(type(value), "a string" if isinstance(value, str) else "a number")
