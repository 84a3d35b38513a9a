"""The parts of deduplication: windows of words, columns, bands, spans in parts, processes."""

from __future__ import annotations

import os
import random
import re
import string
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core import DataError, MinillmError
from minillm_data import spans
from minillm_data.columns import Column
from minillm_data.groups import FOUND, Groups, equal, jaccard, rows_of, similar
from minillm_data.signatures import PERMUTATIONS
from minillm_data.words import PRINTED, WORD, hashed, shingles, windows
from minillm_data.workers import in_order


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 20))
def test_windows_are_equal_where_their_words_are(words: list[int], width: int) -> None:
    found = windows(np.array(words, np.uint64), width).tolist()
    runs = [tuple(words[n : n + width]) for n in range(len(words) - width + 1)]
    assert len(found) == len(runs)
    assert len(set(zip(found, runs, strict=True))) == len(set(found)) == len(set(runs))


def test_a_document_shorter_than_a_shingle_has_one() -> None:
    words = hashed(["a", "b"])
    assert len(shingles(words, 4)) == 1
    assert shingles(words, 4) != shingles(hashed(["b", "a"]), 4)
    assert len(shingles(words[:0], 4)) == 0


@given(st.text(st.sampled_from([*string.ascii_letters, *"é_1 \n.,ßжσ"])))
def test_words_of_alphabets_are_those_of_regular_expressions(text: str) -> None:
    assert WORD.findall(text) == re.findall(r"\w+", text)
    assert PRINTED.findall(text) == text.split()


def test_a_character_of_a_script_without_spaces_is_a_word() -> None:
    assert WORD.findall("床前明月光，疑是abc地上。") == [*"床前明月光疑是", "abc", *"地上"]
    assert PRINTED.findall("明月 光,x") == ["明", "月", "光", ",x"]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=0, max_size=20))
def test_the_first_of_equal_digests_is_found(digests: list[tuple[int, int]]) -> None:
    array = np.array(digests, np.uint64).reshape(-1, 2)
    assert equal(array).tolist() == [digests.index(one) for one in digests]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20))
def test_groups_are_named_by_their_first(pairs: list[tuple[int, int]]) -> None:
    groups, first = Groups(10), list(range(10))
    for one, other in pairs:
        groups.join(one, other)
        low, high = sorted((first[one], first[other]))
        first = [low if name == high else name for name in first]
    assert groups.of(np.arange(10)).tolist() == first


@given(st.sets(st.integers(0, 20)), st.sets(st.integers(0, 20)))
def test_jaccard_is_that_of_sets(one: set[int], other: set[int]) -> None:
    found = jaccard(*(np.array(sorted(each), np.uint64) for each in (one, other)))
    assert found == (len(one & other) / len(one | other) if one | other else 0.0)


@pytest.mark.parametrize("threshold", [0.1, 0.2, 0.5, 0.8, 0.9, 1.0])
def test_bands_find_a_pair_at_the_threshold(threshold: float) -> None:
    rows = rows_of(threshold)

    def found(rows: int) -> float:
        return 1 - (1 - threshold**rows) ** (PERMUTATIONS // rows)

    assert found(rows) >= FOUND
    assert rows == PERMUTATIONS or found(rows + 1) < FOUND


def test_a_pair_is_compared_once_and_never_within_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    # documents 0 to 39 are equal, and 40 to 59 agree in most of their numbers with each other
    draw = np.random.default_rng(1)
    signatures = draw.integers(0, 2**32, (60, PERMUTATIONS), np.uint32)
    signatures[:40] = signatures[0]
    common = draw.integers(0, 2**32, PERMUTATIONS, np.uint32)
    signatures[40:] = np.where(draw.random((20, PERMUTATIONS)) < 0.93, common, signatures[40:])
    compared: list[tuple[int, int]] = []

    def compare(one: np.ndarray, other: np.ndarray) -> float:
        compared.append((int(one[0]), int(other[0])))
        return float(compared[-1][1] < 40)

    monkeypatch.setattr("minillm_data.groups.jaccard", compare)
    group = similar(signatures, np.arange(60), 0.8, lambda one: np.array([one], np.uint64))
    assert group.tolist() == [0] * 40 + list(range(40, 60))
    assert [pair for pair in compared if pair[1] < 40] == [(0, other) for other in range(1, 40)]
    others = [pair for pair in compared if pair[1] >= 40]
    assert len(set(others)) == len(others) > 150


def test_a_column_keeps_what_was_noted(tmp_path: Path) -> None:
    path = tmp_path / "column.bin"
    with Column(path, np.int32, 3) as column:
        column.append(np.arange(12).reshape(4, 3))
        column.sync()
        column.append(np.arange(6).reshape(2, 3))
    with Column(path, np.int32, 3, 4) as column:
        assert column.read().tolist() == np.arange(12).reshape(4, 3).tolist()
        assert column.mapped()[1:3].tolist() == column.read(1, 3).tolist() == [[3, 4, 5], [6, 7, 8]]
        column.put(1, np.array([[0, 0, 0]]))
        column.append(np.zeros((0, 3)))
        assert column.length == 4
        assert column.read(0, 2).tolist() == [[0, 1, 2], [0, 0, 0]]
    assert path.stat().st_size == 48
    with pytest.raises(DataError, match="cut short"):
        Column(path, np.int32, 3, 5)


@settings(max_examples=25)
@given(
    *(st.integers(0, 1000), st.integers(2, 4), st.integers(1, 9)),
    *(st.integers(1, 40), st.integers(1, 16)),
)
def test_the_parts_that_spans_are_found_in_make_no_difference(
    seed: int, width: int, least: int, load: int, block: int
) -> None:
    draw = random.Random(seed)
    texts = [[draw.randrange(3) for _ in range(draw.randrange(20))] for _ in range(8)]
    found = [windows(np.array(text, np.uint64), width) for text in texts]
    kept = np.array([draw.random() < 0.8 for _ in texts])
    seen: dict[int, int] = {}
    expected: list[list[int]] = []
    for number in np.flatnonzero(kept).tolist():
        runs = found[number].tolist()
        cut = {
            n for place, run in enumerate(runs) if run in seen for n in range(place, place + width)
        }
        for place, window in enumerate(runs):
            if window not in seen:
                continue
            last = expected[-1] if expected and expected[-1][0] == number else None
            if last and place <= last[2]:
                last[2] = place + width
            else:
                expected.append([number, place, place + width, seen[window]])
        if not cut or len(texts[number]) - len(cut) >= least:
            seen = dict.fromkeys(runs, number) | seen
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setattr(spans, "_LOAD", load)
        patch.setattr(spans, "_BLOCK", block)
        with (
            Column(Path(folder) / "a", np.uint64) as hashes,
            Column(Path(folder) / "b", np.int64) as links,
        ):
            hashes.append(np.concatenate(found))
            counts = np.array([len(one) for one in found])
            assert spans.repeated(hashes, counts, kept, width, least, links).tolist() == expected


def test_results_come_in_the_order_of_the_work() -> None:
    work = [[str(number)] * (1 + 5000 * (number % 3)) for number in range(12)]
    found = in_order(hashed, work, 2)
    for words, one in zip(work, found, strict=True):
        assert one.tolist() == hashed(words).tolist()


def test_a_process_that_ends_is_an_error() -> None:
    with pytest.raises(MinillmError, match="ended before it was done"):
        list(in_order(os._exit, [0], 2))


def test_an_error_of_the_work_comes_out() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        list(in_order(int, ["1", "x"], 2))
