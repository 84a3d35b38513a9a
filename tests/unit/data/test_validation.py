"""Tests of evaluation windows: every prediction once, in order, with padding only at the end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.data import Batch, Documents, ValidationBatches
from minillm_core.errors import DataError

VOCAB = 1000

id_lists = st.lists(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), min_size=1, max_size=7
)


@given(
    id_lists,
    st.integers(1, 3),
    st.integers(1, 7),
    st.none() | st.integers(1, 40),
    st.none() | st.integers(0, 3),
)
def test_the_first_predictions_of_the_stream_once_each(
    lists: list[list[int]], rows: int, seq_len: int, tokens: int | None, seed: int | None
) -> None:
    documents = Documents.of(lists, VOCAB)
    count = len(lists)
    order = range(count) if seed is None else np.random.default_rng(seed).permutation(count)
    stream = [i for index in order for i in lists[index]]
    predictions = min(len(stream) - 1, len(stream) if tokens is None else tokens)
    batches = ValidationBatches(documents, rows=rows, seq_len=seq_len, tokens=tokens, seed=seed)
    ids, labels, numbers = (
        np.array([b[name].reshape(-1) for b in batches], np.int32).reshape(-1)
        for name in ("ids", "labels", "documents")
    )
    assert batches.predictions == predictions
    assert len(ids) % (rows * seq_len) == 0
    assert len(ids) - predictions < rows * seq_len
    assert ids[:predictions].tolist() == stream[:predictions]
    assert labels[:predictions].tolist() == stream[1 : predictions + 1]
    assert (labels[predictions:] == -1).all()
    assert (numbers[: min(len(stream), len(ids))] >= 0).all()
    assert (numbers[len(stream) :] == -1).all()
    assert (ids[len(stream) :] == 0).all()


@pytest.mark.broad(2)
@given(id_lists, st.integers(1, 3), st.integers(1, 7), st.none() | st.integers(1, 40))
@pytest.mark.parametrize("share", [1e-9, 0.125, 0.5, 0.99, 1.0])
def test_a_share_is_windows_of_the_whole_spread_evenly(
    share: float, lists: list[list[int]], rows: int, seq_len: int, tokens: int | None
) -> None:
    documents = Documents.of(lists, VOCAB)
    all_of, some = (
        ValidationBatches(
            documents, rows=rows, seq_len=seq_len, tokens=tokens, seed=None, share=one
        )
        for one in (1.0, share)
    )
    whole, part = (
        [row for batch in batches for row in zip(*batch.values(), strict=True)]
        for batches in (all_of, some)
    )
    count = -(-all_of.predictions // seq_len)
    taken = min(count, max(1, round(share * count)))
    expected = [index * count // taken for index in range(taken)]
    for row, index in zip(part, expected, strict=False):
        for one, other in zip(row, whole[index], strict=True):
            np.testing.assert_array_equal(one, other)
    assert all((labels == -1).all() for _, labels, *_ in part[taken:])
    assert sum(int((labels >= 0).sum()) for _, labels, *_ in part) == some.predictions
    assert len(some) == -(-taken // rows)


@pytest.mark.parametrize(("answer", "windows"), [(2, 1), (38, 8)])
def test_a_share_without_a_label_is_all_windows(answer: int, windows: int) -> None:
    tokens = np.zeros(41, [("ids", np.int32), ("weights", np.float32)])
    tokens["weights"][answer] = 1.0
    documents = Documents((tokens,), np.array([[0, 0, 41]]), VOCAB, "digest")
    batches = ValidationBatches(documents, rows=2, seq_len=5, tokens=None, seed=None, share=0.125)
    assert batches.predictions == 5 * windows
    assert sum(int((batch["labels"] >= 0).sum()) for batch in batches) == 1


def test_batches_are_the_same_each_time_and_any_of_them_can_be_had() -> None:
    documents = Documents.of([list(range(100))], VOCAB)
    batches = ValidationBatches(documents, rows=2, seq_len=5, tokens=None, seed=0)
    assert len(batches) == len(list(batches)) == 10
    for once, again in zip(batches, list(batches), strict=True):
        np.testing.assert_array_equal(once["ids"], again["ids"])
    np.testing.assert_array_equal(batches[-1]["ids"], batches[9]["ids"])
    with pytest.raises(IndexError):
        batches[10]


def test_on_batch_is_called_in_phase_eval_and_checked() -> None:
    def on_batch(batch: Batch, phase: str) -> Batch:
        assert phase == "eval"
        return {**batch, "ids": batch["ids"] + np.int32(VOCAB)}

    documents = Documents.of([list(range(100))], VOCAB)
    batches = ValidationBatches(
        documents, rows=2, seq_len=5, tokens=None, seed=0, on_batch=on_batch
    )
    with pytest.raises(DataError, match="on_batch returned 'ids'"):
        batches[0]
