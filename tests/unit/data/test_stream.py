"""Tests of the stream: documents in seeded order, contiguous, for any split; resumed at any position."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.data import Cursor, Documents
from minillm_core.data.documents import Stretches, fingerprint, order
from minillm_core.data.stream import Stream, open_rows, overlapping, pack
from minillm_core.errors import DataError

VOCAB = 1000

id_lists = st.lists(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), min_size=1, max_size=7
)
seeds = st.integers(0, 3)


def start(documents: Documents, seed: int) -> Cursor:
    return Cursor(fingerprint(documents, seed))


@given(id_lists, seeds, st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_the_stream_is_the_concatenation_for_any_sizes_of_reads(
    reference_stream: Callable, lists: list[list[int]], seed: int, counts: list[int]
) -> None:
    documents = Documents.of(lists, VOCAB)
    expected, begins = reference_stream(documents, seed, sum(counts) + 1)
    stream, position = Stream(documents, seed, start(documents, seed)), 0
    for count in counts:
        columns, starts = stream.read(count)
        ids = columns["ids"]
        assert ids.dtype == np.int32
        np.testing.assert_array_equal(ids, expected[position : position + count + 1])
        np.testing.assert_array_equal(starts, begins[position : position + count + 1])
        position += count


@given(
    id_lists,
    seeds,
    st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), min_size=1, max_size=6),
)
def test_stretches_are_gathered_as_they_stand_in_the_stream(
    reference_stream: Callable, lists: list[list[int]], seed: int, asked: list[tuple[int, int]]
) -> None:
    documents = Documents.of(lists, VOCAB)
    expected, begins = reference_stream(documents, seed, 131)
    stream = Stream(documents, seed, start(documents, seed))
    first, counts = np.array(asked).T
    at = np.cumsum(counts + 1) - counts  # with a gap before each
    columns, starts = documents.room(int(sum(counts + 1)) + 1), np.zeros(sum(counts + 1) + 1, bool)
    stream.gather(Stretches(first, first + counts, at), columns, starts)
    for place, count, here in zip(first, counts, at, strict=True):
        got = slice(here, here + count)
        np.testing.assert_array_equal(columns["ids"][got], expected[place : place + count])
        np.testing.assert_array_equal(starts[got], begins[place : place + count])
    assert not starts[at - 1].any()
    places = first + counts
    np.testing.assert_array_equal(stream.begins(places), np.asarray(begins)[places])


@given(id_lists, seeds, st.integers(0, 80), st.integers(1, 40))
def test_a_cursor_goes_on_exactly_where_it_was_taken(
    lists: list[list[int]], seed: int, before: int, after: int
) -> None:
    documents = Documents.of(lists, VOCAB)
    stream = Stream(documents, seed, start(documents, seed))
    stream.read(before)
    saved = json.loads(json.dumps(stream.cursor.data()))
    resumed = Stream(documents, seed, Cursor.resume(saved, fingerprint(documents, seed)))
    (wanted_ids, wanted_starts), (got_ids, got_starts) = (s.read(after) for s in (stream, resumed))
    pairs = ((wanted_ids["ids"], got_ids["ids"]), (wanted_starts, got_starts))
    for wanted, got in pairs:
        np.testing.assert_array_equal(got, wanted)
    assert resumed.cursor == stream.cursor


@given(id_lists, seeds, st.lists(st.integers(1, 20), min_size=1, max_size=5))
def test_a_cursor_does_not_know_how_the_stream_was_cut(
    lists: list[list[int]], seed: int, counts: list[int]
) -> None:
    documents = Documents.of(lists, VOCAB)
    whole, pieces = (Stream(documents, seed, start(documents, seed)) for _ in range(2))
    whole.read(sum(counts))
    for count in counts:
        pieces.read(count)
    assert whole.cursor == pieces.cursor


@given(st.integers(1, 4), st.integers(1, 9), st.data())
def test_rows_are_contiguous_with_the_next_token_as_label(
    rows: int, length: int, data: st.DataObject
) -> None:
    size = rows * length
    ids = np.arange(size + 1, dtype=np.int32) + 5
    flags = data.draw(st.lists(st.booleans(), min_size=size + 1, max_size=size + 1))
    starts = np.array(flags)
    batch = pack({"ids": overlapping(ids, rows)}, overlapping(starts, rows))
    assert {name: field.dtype for name, field in batch.items()} == dict.fromkeys(
        ["ids", "labels", "documents", "positions"], np.dtype(np.int32)
    )
    for row in range(rows):
        part = slice(row * length, (row + 1) * length)
        assert batch["ids"][row].tolist() == ids[part].tolist()
        assert batch["labels"][row].tolist() == (ids[part] + 1).tolist()
        assert batch["positions"][row].tolist() == list(range(length))
        number, expected = 0, []
        for position, begins in enumerate(starts[part]):
            number += bool(begins) and position > 0
            expected.append(number)
        assert batch["documents"][row].tolist() == expected
    assert all(field.flags.c_contiguous and field.flags.writeable for field in batch.values())


def test_the_order_is_the_one_that_is_promised() -> None:
    assert order(50, 3, 4).tolist() == np.random.default_rng(7).permutation(50).tolist()


@given(id_lists, st.integers(0, 60), st.integers(1, 60))
def test_a_layout_reads_any_window(lists: list[list[int]], first: int, count: int) -> None:
    documents = Documents.of(lists, VOCAB)
    flat = [i for ids in lists for i in ids]
    first = min(first, len(flat))
    ids, starts = np.full(count, -7, np.int32), np.zeros(count, bool)
    filled = documents.read(first, {"ids": ids}, starts)
    assert ids[:filled].tolist() == flat[first : first + count]
    assert ids[filled:].tolist() == [-7] * (count - filled)


@given(id_lists)
def test_documents_are_views_with_lengths_and_offsets(lists: list[list[int]]) -> None:
    documents = Documents.of(lists, VOCAB)
    assert [documents[i].tolist() for i in range(len(documents))] == lists
    assert documents.lengths.tolist() == [len(ids) for ids in lists]
    assert documents.offsets[-1] == documents.tokens == sum(map(len, lists))
    assert all(np.shares_memory(documents[i], documents.arrays[0]) for i in range(len(lists)))


@pytest.mark.parametrize("lists", [[[1], []], [[VOCAB]], [[-1]]])
def test_documents_are_not_empty_and_in_range(lists: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"token|outside"):
        Documents.of(lists, VOCAB)


@given(id_lists, st.data())
def test_any_change_changes_the_fingerprint(lists: list[list[int]], data: st.DataObject) -> None:
    before = fingerprint(Documents.of(lists, VOCAB), 0)
    assert before == fingerprint(Documents.of(lists, VOCAB), 0)
    assert before != fingerprint(Documents.of(lists, VOCAB), 1)
    assert before != fingerprint(Documents.of([*lists, [1]], VOCAB), 0)
    row = data.draw(st.integers(0, len(lists) - 1))
    changed = [list(ids) for ids in lists]
    changed[row][-1] = (changed[row][-1] + 1) % VOCAB
    assert before != fingerprint(Documents.of(changed, VOCAB), 0)
    longest = max(lists, key=len)
    if len(longest) > 1:  # the same ids, divided into other documents
        cut = [part for ids in lists for part in ([ids[:1], ids[1:]] if ids is longest else [ids])]
        assert before != fingerprint(Documents.of(cut, VOCAB), 0)


def test_a_cursor_of_other_data_is_refused() -> None:
    documents, other = Documents.of([[1, 2, 3]], VOCAB), Documents.of([[1, 2, 4]], VOCAB)
    saved = start(documents, 0).data()
    for wrong, seed in ((other, 0), (documents, 1)):
        with pytest.raises(DataError, match="differ from those that the run was reading"):
            Cursor.resume(saved, fingerprint(wrong, seed))


@pytest.mark.parametrize(
    "damage",
    [
        {"fingerprint": None},
        {"epoch": -1},
        {"epoch": "0"},
        {"offset": 1.0},
        {"document": True},
        {"document": 1},
        {"offset": 3},
    ],
)
def test_a_damaged_cursor_is_refused(damage: dict[str, object]) -> None:
    documents = Documents.of([[1, 2, 3]], VOCAB)
    with pytest.raises(DataError, match="cursor"):
        open_rows(documents, 0, cursor={**start(documents, 0).data(), **damage})


def test_no_tokens_make_no_stream() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        Stream(Documents.of([], VOCAB), 0, Cursor(""))
