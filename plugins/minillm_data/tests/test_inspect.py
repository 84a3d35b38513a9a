"""Data statistics against hand-computed counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core import DataError
from minillm_core.documents import Tokenizer, write_shard
from minillm_data.files import size_of
from minillm_data.inspect import _histogram, inspect, write_page
from minillm_data.tokenize import tokenize

Write = Callable[..., Path]
Program = Callable[..., tuple[int, str, str]]
Prose = Callable[..., list[str]]


def test_text(prose: Prose, jsonl: Write, tokenizer_file: Path) -> None:
    texts = prose(500)
    path = jsonl([{"text": text} for text in texts] + [{"text": ""}])
    found = inspect([path])
    lengths = [len(text) for text in texts]
    assert (found.documents, found.tokens, found.unit) == (500, None, "characters")
    assert found.text_bytes == sum(len(text.encode()) for text in texts)
    assert found.lengths["mean"] == round(float(np.mean(lengths)), 1)
    assert found.lengths["longest"] == max(lengths)
    assert found.lengths["median"] == sorted(lengths)[249]
    assert sum(count for _, _, count in found.histogram) == 500
    assert found.notes == {"left out: empty documents": 1}
    for one in found.samples:
        assert texts[one["document"]].startswith(one["text"])
    assert len({one["document"] for one in found.samples}) == 3
    counted = inspect([path], tokenizer=tokenizer_file)
    assert counted.unit == "tokens"
    assert counted.digest == found.digest


def test_shards_are_decoded_with_the_tokenizer_beside_them(
    prose: Prose, jsonl: Write, tmp_path: Path, tokenizer_file: Path
) -> None:
    texts = prose(50)
    path = jsonl([{"text": text} for text in texts])
    report = tokenize([path], tmp_path / "out", tokenizer=tokenizer_file)
    said: list[str] = []
    found = inspect([tmp_path / "out"], say=said.append)
    assert any("ids are decoded with" in line for line in said)
    assert found.documents == 50
    assert found.tokens == report["tokens"] - 50
    assert found.tokens == inspect([path], tokenizer=tokenizer_file).tokens
    assert found.largest_id is not None
    assert found.largest_id < 290
    for one in found.samples:
        assert texts[one["document"]].startswith(one["text"])
    (tmp_path / "out" / "tokenizer.json").unlink()
    bare = inspect([tmp_path / "out"])
    assert bare.digest == found.digest
    assert set(bare.samples[0]["text"]) <= set("0123456789 ")


def test_shards_are_divided_where_training_divides_them(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    end = Tokenizer.load(tokenizer_file, 300).end_of_text
    write_shard(tmp_path / "a.bin", np.array([end, 65, 66, 65, end, 67]), 300)
    write_shard(tmp_path / "b.bin", np.array([66, 65, 66, end, 65, 66, 66]), 300)
    found = inspect([tmp_path], samples=9)
    documents = ["65 66 65", "67", "66 65 66", "65 66 66"]
    assert [one["text"] for one in found.samples] == documents
    (tmp_path / "a.bin").unlink()
    found = inspect([tmp_path], tokenizer=tokenizer_file, samples=9)
    assert [one["length"] for one in found.samples] == [3, 3], (
        "the end-of-text id is the tokenizer's"
    )


def test_a_digest_changes_with_any_content_or_boundary(jsonl: Write) -> None:
    kinds = [["ab", "c"], ["a", "bc"], ["abc"], ["ab", "d"], ["c", "ab"]]
    found = {inspect([jsonl([{"text": t} for t in texts])]).digest for texts in kinds}
    found.add(inspect([jsonl([{"ids": [1, 2]}])]).digest)
    found.add(inspect([jsonl([{"ids": [1]}, {"ids": [2]}])]).digest)
    assert len(found) == 7


@pytest.mark.parametrize(
    ("records", "unit", "tokens"),
    [
        ([{"text": "abcd"}], "characters", None),
        ([{"ids": [1, 2]}], "tokens", 2),
        ([{"text": "abcd"}, {"ids": [1, 2]}], "characters or ids", None),
    ],
)
def test_lengths_have_the_unit_of_every_document(
    jsonl: Write, records: list[dict[str, Any]], unit: str, tokens: int | None
) -> None:
    found = inspect([jsonl(records)])
    assert (found.unit, found.tokens) == (unit, tokens)


def test_a_long_text_is_one_document(tmp_path: Path) -> None:
    text = "some words, again and again\n" * 80_000
    (tmp_path / "a.txt").write_text(text)
    found = inspect([tmp_path / "a.txt"])
    assert (found.documents, found.lengths["longest"]) == (1, len(text))


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=200))
def test_a_histogram_counts_every_length_once(lengths: list[int]) -> None:
    found = _histogram(np.array(lengths, np.int64))
    assert sum(count for _, _, count in found) == len(lengths)
    for first, last, count in found:
        assert count == sum(first <= length <= last for length in lengths)
    assert all(b[0] == a[1] + 1 for a, b in pairwise(found))


def test_the_command_and_its_page(
    jsonl: Write, tmp_path: Path, program: Program, prose: Prose
) -> None:
    path = jsonl([{"text": "<b>\x1b[31mred"}] + [{"text": text} for text in prose(30)])
    page = tmp_path / "page.html"
    code, out, err = program("data", "inspect", str(path), "--samples", "31", "--page", str(page))
    assert code == 0, err
    assert "documents   31" in out
    assert "\x1b" not in out
    assert "&lt;b&gt;" in page.read_text()
    assert "<b>" not in page.read_text().partition("</style>")[2].partition("Document 0")[2]
    path.write_text('{"text": "a"}\nno JSON\n')
    code, out, _ = program("data", "inspect", str(path), "--malformed", "skip")
    assert "text        1 byte\n" in out
    assert "not a line of JSON  1 left out\n" in out
    path.write_text('{"text": "a"}\n' * 31)
    code, out, _ = program("data", "inspect", str(path), "--json")
    assert json.loads(out)["documents"] == 31


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 bytes"), (999, "999 bytes"), (61_100, "61.1 kB"), (1_234_000_000, "1,234.0 MB")],
)
def test_a_size_has_the_unit_that_shows_it(size: int, shown: str) -> None:
    assert size_of(size) == shown


def test_nothing_to_inspect_is_refused(tmp_path: Path, jsonl: Write) -> None:
    with pytest.raises(DataError, match="the data are empty"):
        inspect([jsonl([])])
    found = inspect([jsonl([{"text": "a"}])])
    with pytest.raises(DataError, match="the page cannot be written"):
        write_page(found, tmp_path / "no" / "page.html")
