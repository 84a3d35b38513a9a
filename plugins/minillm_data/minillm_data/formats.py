"""Additional file formats: Parquet and Arrow, and the bin and bin2d sets of the first MiniLLM trainer.

Each is named by an entry point of the group ``minillm.formats`` and imported when such a file is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from minillm_core import DataError
from minillm_core.commands import pip_line
from minillm_core.documents import (
    Document,
    Format,
    MalformedError,
    Place,
    Reading,
    Record,
    documents_of,
)
from minillm_data.rows import CHATS, json_line

_ROWS = 256
"""Rows of a table held in memory at a time."""

_COLUMNS = ("text", "ids", *CHATS)
_DOCUMENT = (*_COLUMNS, "labels")  # of which documents_of makes documents, errors and notes

Batches = Callable[[Path, Reading, Collection[str] | None], Iterator[Any]]
"""Reads the record batches of a table: these columns, or all of them if that is None."""


@dataclass(frozen=True)
class TableRow(Place):
    """The location of a table row, for error messages; ``line`` is its index from 0."""

    def name(self, byte: int = 0) -> str:
        return f"{self.path}, row {self.line}"


def _rows(
    batches: Batches,
    path: Path,
    packing: str,
    reading: Reading,
    columns: Collection[str] | None = None,
) -> Iterator[tuple[TableRow, dict[str, Any]]]:
    """Read a table row by row; each row is an object with the columns as keys."""
    number = 0
    try:
        for batch in batches(path, reading, columns):
            for record in batch.to_pylist():
                yield TableRow(path, packing, number, 0), record
                number += 1
    except (OSError, ValueError) as error:  # Arrow's errors are ValueErrors and OSErrors
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"the table cannot be read: {str(error).splitlines()[0]}",
            where=f"{path}, row {number}",
            fix="fetch or write the file again",
        ) from error


def _records(batches: Batches, path: Path, packing: str, reading: Reading) -> Iterator[Record]:
    for place, record in _rows(batches, path, packing, reading):
        yield place, json_line(record), record


def _documents(batches: Batches, path: Path, packing: str, reading: Reading) -> Iterator[Document]:
    """Read the documents of a table, from the columns that make them."""
    rows = _rows(batches, path, packing, reading, _DOCUMENT)
    return documents_of(((place, b"", record) for place, record in rows), reading)


def _arrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise DataError(
            "tables need pyarrow to be read", where=str(path), fix=pip_line("minillm-data[parquet]")
        ) from error
    return pyarrow


def _parquet_batches(
    path: Path, reading: Reading, columns: Collection[str] | None
) -> Iterator[Any]:
    parquet = _arrow(path).parquet
    with parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        _check_columns(names, path)
        chosen = columns and [name for name in names if name in columns]
        for group in range(file.metadata.num_row_groups):
            yield from file.iter_batches(_ROWS, row_groups=[group], columns=chosen)
            reading.tick(path.stat().st_size // file.metadata.num_row_groups)


def _arrow_batches(path: Path, reading: Reading, columns: Collection[str] | None) -> Iterator[Any]:
    """Read an Arrow stream, as written by ``datasets.save_to_disk``, or an Arrow file."""
    if _is_cache(path):
        reading.notes["left out: files that the library datasets keeps beside its data"] += 1
        reading.tick(path.stat().st_size)
        return
    arrow = _arrow(path)
    with arrow.memory_map(str(path)) as file:
        try:
            opened = arrow.ipc.open_stream(file)
        except arrow.ArrowInvalid:
            opened = arrow.ipc.open_file(file)
            whole = (opened.get_batch(index) for index in range(opened.num_record_batches))
        else:
            whole = iter(opened)
        names = opened.schema.names
        _check_columns(names, path)
        chosen = [n for n, name in enumerate(names) if columns is None or name in columns]
        before = 0
        for batch in (one.select(chosen) for one in whole):
            for first in range(0, batch.num_rows, _ROWS):
                yield batch.slice(first, _ROWS)
            reading.tick(file.tell() - before)
            before = file.tell()


def _is_cache(path: Path) -> bool:
    """Return whether a file is the cached result of a ``map`` or ``filter``, and not a saved dataset's data."""
    try:
        files = json.loads(path.with_name("state.json").read_bytes())["_data_files"]
        return path.name not in {one["filename"] for one in files}
    except (OSError, ValueError, KeyError, TypeError):  # not in a folder of save_to_disk
        return path.name.startswith("cache-")


def _check_columns(names: list[str], path: Path) -> None:
    if not set(names) & set(_COLUMNS):
        raise DataError(
            f"the table has no column {' or '.join(map(repr, _COLUMNS))}",
            where=f"{path}: it has {', '.join(map(repr, names))}",
            fix='rename the column of the text to "text"',
        )


PARQUET = Format(
    "Parquet",
    (".parquet",),
    partial(_documents, _parquet_batches),
    partial(_records, _parquet_batches),
)
ARROW = Format(
    "Arrow", (".arrow",), partial(_documents, _arrow_batches), partial(_records, _arrow_batches)
)


# bin and bin2d

MAGIC = "minillm bin"
"""The value of "magic" in the meta.json of a version 2 set."""

_CHUNK = 1 << 22  # ids checked at a time


def read_bin(path: Path, packing: str, reading: Reading) -> Iterator[Document]:
    """Read a set of ids, given its ``P.ids.bin`` or ``P.ids2d.bin``: one document per sample.

    Version 1 was written by the first MiniLLM trainer, version 2 by ``minillm data tokenize``.

    Raises:
        DataError: a file of the set is missing, damaged, or holds an id that is too large.
    """
    meta = _meta(_meta_path(path))
    ids = np.memmap(path, np.dtype(str(meta["dtype"])), "r") if path.stat().st_size else None
    if ids is None:
        raise _broken(path, "the file of ids is empty")
    if meta["digest"]:
        _check_digest(path, meta["digest"])
    for number, (first, last) in enumerate(_spans(path, meta, len(ids))):
        sample = ids[first:last]
        if meta["stride"]:
            sample = sample[: _without_padding(sample, meta["pad"])]
        if len(sample) and int(sample.max()) >= reading.vocab:
            place = TableRow(path, packing, number, 0)
            reading.malformed(
                place.error(
                    f"id {int(sample.max())} is outside 0 <= id < model.vocab={reading.vocab}",
                    "use the tokenizer that the set was made with, and a model.vocab that holds it",
                    reason="an id outside the vocabulary",
                )
            )
            continue
        reading.tick(sample.nbytes)
        if len(sample):
            yield np.array(sample, np.uint32)


def _end_of_text(path: Path) -> int | None:
    """Return the id that begins each document of a set; None: it was written by the first trainer."""
    return _meta(_meta_path(path))["end_of_text"]


def _meta_path(path: Path) -> Path:
    prefix = path.name.removesuffix(".ids.bin").removesuffix(".ids2d.bin")
    return path.with_name(f"{prefix}.meta.json")


def _meta(path: Path) -> dict[str, Any]:
    """Read a meta.json: dtype, samples, stride (0 for bin), pad, end_of_text and digest."""
    try:
        found = json.loads(path.read_bytes())
        version, kind = found["version"], found["format"]
        stated = {
            "dtype": {"int32": "<u4", "uint32": "<u4", "uint16": "<u2"}[found["ids"]["dtype"]],
            "samples": int(found["num_samples"]),
            "stride": int(found["stride"]) if kind == "bin2d" else 0,
            "pad": int(found.get("pad_id", 0)),
            "end_of_text": int(found["end_of_text_id"]) if "end_of_text_id" in found else None,
            "digest": found["digest"] if version == 2 else None,
        }
    except FileNotFoundError as error:
        raise DataError(
            "the set of ids has no meta.json", where=str(path), fix="give it back, beside the ids"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise _broken(path, f"it does not describe a set of ids ({error})") from error
    if version not in (1, 2) or (version == 2 and found.get("magic") != MAGIC):
        raise _broken(path, f"version {version!r}, where versions 1 and 2 are read")
    return stated


def _spans(path: Path, meta: dict[str, Any], ids: int) -> Iterator[tuple[int, int]]:
    if stride := meta["stride"]:
        if ids < meta["samples"] * stride:
            raise _broken(path, f"{ids} ids, where {meta['samples']} x {stride} are stated")
        return ((n * stride, (n + 1) * stride) for n in range(meta["samples"]))
    index_path = path.with_name(path.name.removesuffix(".bin") + ".idx")
    try:
        index = np.fromfile(index_path, "<u8").reshape(-1, 2)
    except (OSError, ValueError) as error:
        raise _broken(index_path, f"the index cannot be read: {error}") from error
    ends = index[:, 0] + index[:, 1]
    if len(index) != meta["samples"] or (len(ends) and int(ends.max()) > ids):
        raise _broken(index_path, "the index does not fit the ids")
    return ((int(first), int(end)) for first, end in zip(index[:, 0], ends, strict=True))


def _without_padding(sample: np.ndarray, pad: int) -> int:
    """Return the length of a padded sample without its trailing pad ids."""
    real = np.flatnonzero(sample != pad)
    return int(real[-1]) + 1 if len(real) else 0


def _check_digest(path: Path, stated: str) -> None:
    import xxhash

    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            state.update(chunk)
    if state.hexdigest() != stated:
        raise _broken(path, "the ids are not those that were written: another digest")


def _broken(path: Path, what: str) -> MalformedError:
    return MalformedError(what, where=str(path), fix="write the set again")


def read_labels(path: Path, packing: str, reading: Reading) -> Iterator[Document]:
    """Skip a chat set's file of labels, which is not supported yet, and count it."""
    reading.notes["left out: files of labels, which are not used"] += 1
    return iter(())


# the name is part of the key of cached tokens
BIN = Format("set of ids", (".ids.bin", ".ids2d.bin"), read_bin, end_of_text=_end_of_text)
LABELS = Format("labels of a set of ids", (".lbl.bin",), read_labels)
