"""Additional file formats yield the same documents as JSON lines of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from minillm_core import DataError
from minillm_core.documents import Reading, find
from minillm_data import formats as module
from minillm_data.formats import MAGIC
from minillm_data.mix import mix
from minillm_data.rows import Rows

Write = Callable[..., Path]


def documents(path: Path, vocab: int = 1 << 16) -> list[Any]:
    reading = Reading(vocab)
    found: list[Any] = []
    for source in find([str(path)], lambda line: None):
        assert source.format.read is not None
        found += source.format.read(source.path, source.packing, reading)
    return [one if isinstance(one, str) else one.tolist() for one in found]


RECORDS = [{"text": f"document {n} äö", "id": n, "source": None} for n in range(1000)]


@pytest.mark.parametrize("groups", [1000, 300])
def test_parquet(tmp_path: Path, groups: int) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.Table.from_pylist(RECORDS)
    pyarrow.parquet.write_table(table, path, row_group_size=groups)
    assert documents(path) == [one["text"] for one in RECORDS]
    rows = list(Rows([path]))
    assert [json.loads(row.line) for row in rows] == RECORDS
    assert rows[999].where == f"{path}, row 999"


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_arrow_as_datasets_saves_it(tmp_path: Path, kind: str) -> None:
    table = pyarrow.Table.from_pylist(RECORDS)
    path = tmp_path / "data-00000-of-00001.arrow"
    new = pyarrow.ipc.new_stream if kind == "stream" else pyarrow.ipc.new_file
    with pyarrow.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=300)
    (tmp_path / "state.json").write_text("{}")
    assert documents(tmp_path) == [one["text"] for one in RECORDS]
    assert [json.loads(row.line) for row in Rows([tmp_path])] == RECORDS
    # what the library keeps of ``map`` and ``filter``, beside a dataset of ``save_to_disk`` and in its cache
    (tmp_path / "cache-1.arrow").write_bytes(path.read_bytes())
    (tmp_path / "more.arrow").write_bytes(path.read_bytes())
    assert len(documents(tmp_path)) == 2000
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": path.name}]}))
    rows = Rows([tmp_path])
    assert [json.loads(row.line) for row in rows] == RECORDS
    assert rows.notes == {"left out: files that the library datasets keeps beside its data": 2}


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_values_that_json_lacks_are_written_as_text_or_null(tmp_path: Path, suffix: str) -> None:
    record = {
        "day": date(2024, 5, 6),
        "image": {"bytes": b"\x89"},
        "text": "a",
        "price": Decimal("1.50"),
        "scores": [float("nan"), 0.5, float("-inf")],
    }
    table, path = pyarrow.Table.from_pylist([record]), tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.OSFile(str(path), "wb") as file:
            pyarrow.ipc.new_stream(file, table.schema).write_table(table)
    assert documents(path) == ["a"]
    batches = getattr(module, f"_{suffix}_batches")
    assert next(batches(path, Reading(300), ("text", "ids"))).schema.names == ["text"]
    assert mix([path], tmp_path / "out")["documents"] == 1
    assert documents(tmp_path / "out") == ["a"], "with the core's reader, which refuses NaN"
    written = json.loads((tmp_path / "out" / "part-00000.jsonl").read_text())
    assert written == {
        "day": "2024-05-06",
        "image": {"bytes": "b'\\x89'"},
        "text": "a",
        "price": "1.50",
        "scores": [None, 0.5, None],
    }


@pytest.mark.parametrize("command", ["inspect", "filter", "dedup", "mix"])
@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.zst"])
def test_a_command_reads_what_its_help_says(
    tmp_path: Path, program: Callable[..., tuple[int, str, str]], command: str, name: str
) -> None:
    path, records = tmp_path / name, RECORDS[:3]
    if name.endswith(".zst"):
        lines = "".join(json.dumps(one) + "\n" for one in records)
        path.write_bytes(pytest.importorskip("backports.zstd").compress(lines.encode()))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    to = () if command == "inspect" else ("--to", str(tmp_path / "out"))
    code, out, err = program("data", command, str(path), *to, "--json")
    assert code == 0, err
    assert json.loads(out)["documents"] == 3
    _, out, _ = program("data", command, "--help")
    assert ".zst" in out
    assert "Parquet" in out


def test_columns_of_ids_and_wrong_ones(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"ids": [[1, 2], [3]]}), path)
    assert documents(path) == [[1, 2], [3]]
    with pytest.raises(DataError, match="id 3 at index 0") as raised:
        documents(path, vocab=3)
    assert raised.value.where == f"{path}, row 1"
    pyarrow.parquet.write_table(pyarrow.table({"content": ["a"]}), path)
    with pytest.raises(DataError, match="the table has no column 'text'"):
        documents(path)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), path)
    with pytest.raises(DataError, match='"text" is null'):
        documents(path)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_damaged_table_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"PAR1 no table")
    with pytest.raises(DataError, match="the table cannot be read") as raised:
        documents(path)
    assert str(path) in str(raised.value.where)


def test_a_progress_reaches_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.Table.from_pylist(RECORDS)
    pyarrow.parquet.write_table(table, path, row_group_size=100)
    ticks: list[int] = []
    (source,) = find([str(path)], print)
    assert source.format.read is not None
    list(source.format.read(path, "", Reading(100, ticks.append)))
    assert 0.98 * path.stat().st_size < sum(ticks) <= path.stat().st_size


SAMPLES = [[5, 6, 7], [8], [9, 10, 11, 12]]


def write_set(folder: Path, kind: str, version: int, changes: dict[str, Any] | None = None) -> Path:
    """Write a set of ids byte by byte, following the format's definition."""
    ids, stride = np.concatenate(SAMPLES).astype("<u4"), 5
    meta: dict[str, Any] = {
        "version": version,
        "format": kind,
        "task": "pretrain",
        "num_samples": len(SAMPLES),
        "byteorder": "little",
        "seq_len": stride - 1,
        "ids": {"bin": f"P.{kind}", "idx": None, "dtype": "int32"},
        "labels": None,
    }
    if kind == "bin2d":
        ids = np.array([[*one, *[0] * (stride - len(one))] for one in SAMPLES], "<u4").ravel()
        meta["stride"] = stride
    path = folder / ("P.ids.bin" if kind == "bin" else "P.ids2d.bin")
    if version == 2:
        import xxhash

        meta |= {"magic": MAGIC, "pad_id": 0, "digest": xxhash.xxh3_128(ids.tobytes()).hexdigest()}
    meta |= changes or {}
    path.write_bytes(ids.tobytes())
    ends = np.cumsum([len(one) for one in SAMPLES])
    index = np.stack([ends - [len(one) for one in SAMPLES], [len(one) for one in SAMPLES]], 1)
    index.astype("<u8").tofile(folder / "P.ids.idx")
    (folder / "P.lbl.bin").write_bytes(b"\0" * 8)
    (folder / "P.meta.json").write_text(json.dumps(meta))
    return path


@pytest.mark.parametrize("kind", ["bin", "bin2d"])
@pytest.mark.parametrize("version", [1, 2])
def test_the_first_trainer_s_sets(tmp_path: Path, kind: str, version: int) -> None:
    path = write_set(tmp_path, kind, version)
    assert documents(path) == SAMPLES
    assert documents(tmp_path) == SAMPLES, "of the folder, beside index, labels and meta"
    with pytest.raises(DataError, match="id 12 is outside"):
        documents(path, vocab=12)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 3}, "version 3, where versions 1 and 2 are read"),
        ({"magic": "other"}, "version 2, where"),
        ({"digest": "0" * 32}, "another digest"),
        ({"num_samples": 4}, "does not fit|are stated"),
        ({"ids": {"dtype": "float32"}}, "does not describe a set of ids"),
    ],
)
@pytest.mark.parametrize("kind", ["bin", "bin2d"])
def test_a_set_that_is_wrong_is_refused(
    tmp_path: Path, kind: str, changes: dict[str, Any], said: str
) -> None:
    path = write_set(tmp_path, kind, 2, changes)
    with pytest.raises(DataError, match=said):
        documents(path)


def test_a_set_without_its_files_is_refused(tmp_path: Path) -> None:
    path = write_set(tmp_path, "bin", 1)
    (tmp_path / "P.ids.idx").write_bytes(b"\0" * 7)
    with pytest.raises(DataError, match="the index"):
        documents(path)
    (tmp_path / "P.meta.json").unlink()
    with pytest.raises(DataError, match=r"the set of ids has no meta\.json"):
        documents(path)
    write_set(tmp_path, "bin", 1)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="is empty"):
        documents(path)


def test_a_table_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(DataError) as raised:
        documents(tmp_path / "a.parquet")
    assert "minillm-data[parquet]" in str(raised.value.fix)
    assert module.PARQUET.read is not None
