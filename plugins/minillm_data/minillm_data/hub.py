"""Streamed Hugging Face datasets: a file ``NAME.hub`` declares one, and is read like any data file.

    {"name": "roneneldan/TinyStories", "split": "train", "revision": "main", "megabytes": 100}

The file is JSON with the keys name, megabytes, and where needed config, split, revision, column (of the
text, if that is not "text") and data_files. Rows are read by ``datasets.load_dataset(...,
streaming=True)`` up to that many megabytes (10^6 bytes) of JSON lines, since exact resume, epochs and a
held-out part need a finite dataset. They are tokenised once into the cache, like the
lines of a file with the same rows, and later starts read only the cache. Without ``data.tokenizer`` the
rows are streamed twice, the first time to train a tokenizer. Set a commit as ``revision`` where the
dataset may change; the cache key is derived from the file's own bytes.

A .hub file works wherever data files do: beside others, with a weight in a mixture, in the data
commands, and in sources of other plugins, which read its rows as records.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minillm_core import DataError
from minillm_core.commands import pip_line
from minillm_core.documents import Document, Format, Reading, Record, documents_of
from minillm_data.formats import TableRow
from minillm_data.rows import json_line

_KEYS = {
    "name": str,
    "megabytes": (int, float),
    "config": str,
    "split": str,
    "revision": str,
    "column": str,
    "data_files": (str, list),
}


def described(path: Path) -> dict[str, Any]:
    """Read the dataset description from a file.

    Raises:
        DataError: the description is invalid.
    """
    try:
        found = json.loads(path.read_bytes()[: 1 << 16])
        keys = found.keys()
    except (OSError, ValueError, AttributeError) as error:
        raise _wrong(path, f"it is not a JSON object: {error}") from error
    if unknown := sorted(keys - _KEYS.keys()):
        raise _wrong(path, f"unknown keys: {', '.join(unknown)}")
    for key in sorted({"name", "megabytes"} - keys):
        raise _wrong(path, f'"{key}" is missing')
    for key, value in found.items():
        if not isinstance(value, _KEYS[key]) or isinstance(value, bool):
            raise _wrong(path, f'"{key}" cannot be {value!r}')
    if not 0 < found["megabytes"] < 1e6:
        raise _wrong(path, '"megabytes" is a number above 0')
    return found


def _wrong(path: Path, what: str) -> DataError:
    fix = 'like {"name": "OWNER/NAME", "split": "train", "megabytes": 100}'
    return DataError(f"no description of a dataset: {what}", where=str(path), fix=fix)


def _records(path: Path, packing: str, reading: Reading) -> Iterator[Record]:
    given = described(path)
    limit, size, column = given["megabytes"] * 1e6, path.stat().st_size, given.get("column")
    try:
        from datasets import load_dataset
    except ImportError as error:
        fix = pip_line("minillm-data[hub]")
        raise DataError("datasets of the hub need datasets", where=str(path), fix=fix) from error
    done = number = ticked = 0
    options = {key: given[key] for key in ("revision", "data_files") if key in given}
    try:
        rows = load_dataset(
            given["name"],
            given.get("config"),
            split=given.get("split", "train"),
            streaming=True,
            **options,
        )
        for number, row in enumerate(rows):
            if column is not None and column not in row:
                raise DataError(
                    f"no column {column!r}: it has {', '.join(map(repr, row))}",
                    where=f"{path}, row {number}",
                    fix='give the name of the column of the text as "column"',
                )
            record = dict(row)
            if column is not None:
                record["text"] = row[column]
                record.pop("ids", None)  # else the document
            line = json_line(record)
            done += len(line)
            if done > limit and number:
                break
            yield TableRow(path, packing, number, 0), line, record
            share = int(size * min(done / limit, 1.0))
            reading.tick(share - ticked)
            ticked = share
    except DataError:
        raise
    except Exception as error:  # from the network, or any format that datasets reads
        said, *_ = str(error).splitlines() or [""]
        raise DataError(
            f"the dataset cannot be read: {type(error).__name__}: {said}",
            where=f"{path}, row {number}",
            fix="check name, config, split and the connection; a dataset that needs a script or an "
            "account is better saved as Parquet first",
        ) from error


def _documents(path: Path, packing: str, reading: Reading) -> Iterator[Document]:
    return documents_of(_records(path, packing, reading), reading)


def _text(path: Path) -> int:
    return int(described(path)["megabytes"] * 1e6)


HUB = Format("dataset of the hub", (".hub",), _documents, _records, text=_text)
