"""Tests of token shards: round trip, damage, ids out of range."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.data import shards, write_shard
from minillm_core.data.shards import check_ids, map_shard, starts
from minillm_core.errors import DataError


@given(st.data(), st.sampled_from([300, 65_536, 65_537, 2**31 - 1]))
def test_shards_round_trip(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, vocab: int
) -> None:
    ids = data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=50))
    path = tmp_path_factory.mktemp("shards") / "a.bin"
    write_shard(path, np.array(ids), vocab)
    found, _ = map_shard(path)
    assert found.tolist() == ids
    assert found.dtype == (np.uint16 if vocab <= 65_536 else np.uint32)
    check_ids(found, vocab, path)
    assert [file.name for file in path.parent.iterdir()] == ["a.bin"]


def test_the_layout_is_that_of_llm_c(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_shard(path, np.array([50256, 1, 2, 50256, 3]), 50_257)
    header = np.fromfile(path, "<i4", 256)
    assert header[:3].tolist() == [20240520, 1, 5]
    assert not header[3:].any()
    assert np.fromfile(path, "<u2", offset=1024).tolist() == [50256, 1, 2, 50256, 3]


@pytest.mark.parametrize(
    ("word", "value", "said"),
    [
        (0, 20240801, "it begins with 20240801, not 20240520"),
        (1, 7, "version 7"),
        (2, 11, "cut short: its header says 11 tokens"),
        (2, 9, "wrong: its header says 9 tokens"),
        (2, 0, "wrong"),
        (2, -5, "wrong"),
    ],
)
def test_a_bad_header_is_named(tmp_path: Path, word: int, value: int, said: str) -> None:
    path = tmp_path / "a.bin"
    write_shard(path, np.arange(10), 300)
    data = bytearray(path.read_bytes())
    data[4 * word : 4 * word + 4] = np.array([value], "<i4").tobytes()
    path.write_bytes(data)
    with pytest.raises(DataError) as raised:
        map_shard(path)
    assert said in str(raised.value)
    assert str(path) in str(raised.value)


@given(st.integers(0, 1024 + 19))
def test_a_shard_cut_anywhere_is_refused(
    tmp_path_factory: pytest.TempPathFactory, size: int
) -> None:
    path = tmp_path_factory.mktemp("shards") / "a.bin"
    write_shard(path, np.arange(10), 300)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match=r"not a token shard|cut short"):
        map_shard(path)


@given(st.integers(0, 99), st.integers(1, 30), st.sampled_from([300, 1000]))
def test_a_poisoned_id_is_found_wherever_it_is(place: int, chunk: int, value: int) -> None:
    ids = np.arange(100, dtype=np.uint16)
    ids[place] = value
    before, shards._CHUNK = shards._CHUNK, chunk
    try:
        with pytest.raises(DataError) as raised:
            check_ids(ids, 300, Path("a.bin"))
    finally:
        shards._CHUNK = before
    assert f"id {value} is outside 0 <= id < model.vocab=300" in str(raised.value)
    assert f"a.bin, token {place}, byte {1024 + 2 * place}" in str(raised.value)


def test_documents_begin_at_end_of_text_and_at_the_beginning() -> None:
    assert starts(np.array([5, 1, 2, 5, 5, 3]), 5).tolist() == [0, 3, 4]
    assert starts(np.array([1, 2, 5, 3]), 5).tolist() == [0, 2]


@pytest.mark.parametrize("ids", [[], [-1], [300]])
def test_what_is_no_shard_is_not_written(tmp_path: Path, ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"tokens|outside"):
        write_shard(tmp_path / "a.bin", np.array(ids, np.int64), 300)
    assert not list(tmp_path.iterdir())


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        map_shard(tmp_path / "gone.bin")
