"""Datasets of the Hugging Face hub: their loader, on local files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minillm_core import DataError
from minillm_core.documents import Reading, find, fitting_entries
from minillm_data.hub import described


@pytest.fixture
def hub(tmp_path: Path) -> Any:
    """Return a function that writes a .hub file and returns its source."""

    def make(**given: Any) -> Any:
        path = tmp_path / "some.hub"
        path.write_text(json.dumps({"name": "json", "megabytes": 1, **given}))
        (source,) = find([str(path)], lambda line: None)
        return source

    return make


def documents(source: Any) -> list[Any]:
    return list(source.format.read(source.path, source.packing, Reading(300)))


def test_rows_are_streamed_up_to_a_size(hub: Any, jsonl: Any, prose: Any) -> None:
    pytest.importorskip("datasets", reason="datasets of the hub need the package datasets")
    texts = prose(60)
    path = jsonl([{"text": text, "n": n} for n, text in enumerate(texts)])
    assert documents(hub(data_files=str(path))) == texts
    few = documents(hub(data_files=[str(path)], megabytes=0.002))
    assert 0 < len(few) < 60
    assert few == texts[: len(few)]
    assert sum(len(text.encode()) for text in few) <= 2000
    other = jsonl(
        [{"content": text, "ids": [n]} for n, text in enumerate(texts[:3])], "other.jsonl"
    )
    source = hub(data_files=str(other), column="content")
    assert documents(source) == texts[:3]
    records = list(source.format.records(source.path, "", Reading(300)))
    assert [one["content"] for _, _, one in records] == texts[:3]
    assert json.loads(records[0][1])["text"] == texts[0]
    with pytest.raises(DataError, match=r"the dataset cannot be read: ValueError: Bad split"):
        documents(hub(data_files=str(other), split="nosuch"))
    with pytest.raises(DataError, match="no column 'nosuch': it has 'content', 'ids'"):
        documents(hub(data_files=str(other), column="nosuch"))


def test_parquet_is_streamed_too(hub: Any, prose: Any, tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="datasets of the hub need the package datasets")
    arrow = pytest.importorskip("pyarrow")

    arrow.parquet.write_table(arrow.table({"text": prose(20)}), tmp_path / "a.parquet")
    source = hub(name="parquet", data_files=str(tmp_path / "a.parquet"))
    assert documents(source) == prose(20)


def test_its_vocabulary_is_that_of_its_text_and_not_of_its_description(hub: Any) -> None:
    assert fitting_entries([hub(megabytes=100)], 4096) == 4096
    assert fitting_entries([hub(megabytes=0.5)], 4096) == 512


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nothing", "not a JSON object"),
        ("[1]", "not a JSON object"),
        ('{"megabytes": 1}', '"name" is missing'),
        ('{"name": "a"}', '"megabytes" is missing'),
        ('{"name": 1, "megabytes": 1}', '"name" cannot be 1'),
        ('{"name": "a", "megabytes": true}', '"megabytes" cannot be True'),
        ('{"name": "a", "megabytes": 0}', "a number above 0"),
        ('{"name": "a", "megabytes": 1, "rows": 3}', "unknown keys: rows"),
    ],
)
def test_what_describes_no_dataset_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "a.hub"
    path.write_text(text)
    with pytest.raises(DataError) as refused:
        described(path)
    assert said in str(refused.value)


def test_without_the_package_its_pip_line_is_said(hub: Any, monkeypatch: Any) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="need datasets") as refused:
        documents(hub())
    assert "minillm-data[hub]" in str(refused.value)
