"""Tests of the rule for the vocabulary size of a small text."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.data import write_shard
from minillm_core.data.sources import SMALLEST, TEXT_PER_ENTRY, Source, find, fitting_entries


def found(path: Path) -> list[Source]:
    return find([str(path)], lambda line: None)


@pytest.mark.parametrize(
    ("size", "asked", "got"),
    [
        (1_115_394, 4096, 1024),  # tinyshakespeare
        (1_115_394, 50_304, 1024),
        (4096 * TEXT_PER_ENTRY, 4096, 4096),
        (4096 * TEXT_PER_ENTRY - 1, 4096, 2048),
        (50_304 * TEXT_PER_ENTRY, 50_304, 50_304),
        (100, 4096, SMALLEST),
        (100, 300, 300),
    ],
)
def test_each_entry_has_its_share_of_the_text(
    tmp_path: Path, size: int, asked: int, got: int
) -> None:
    path = tmp_path / "a.txt"
    with path.open("wb") as file:
        file.truncate(size)
    assert fitting_entries(found(path), asked) == got


@given(size=st.integers(0, 1 << 40), asked=st.integers(2, 1 << 20))
def test_it_never_grows_and_is_a_power_of_two_where_it_shrinks(size: int, asked: int) -> None:
    class Text:
        format = None

    source: Any = Text()
    source.unpacked = size
    entries = fitting_entries([source], asked)
    assert entries <= asked
    if entries < asked:
        assert entries & entries - 1 == 0
        assert entries == SMALLEST or entries <= size / TEXT_PER_ENTRY < 2 * entries


def test_token_ids_keep_the_vocabulary_that_they_were_made_with(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"ids": [1, 2, 3]}\n')
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a", "ids": [5000]}\n'))
    write_shard(tmp_path / "c.bin", [0, 4000], 4096)  # type: ignore[arg-type]
    for path in tmp_path.iterdir():
        assert fitting_entries(found(path), 50_304) == 50_304
