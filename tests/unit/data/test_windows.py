"""Tests of windows, rows in a plugin's order: every token once per epoch, resumed, in any split."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minillm_core as minillm
from minillm_core.data import Documents, Loader, StepBatch
from minillm_core.errors import PlanError, PluginCodeError
from minillm_core.nn.reference import Function
from minillm_data.shuffle_rows import shuffled

VOCAB = 10_000
lengths = st.lists(st.integers(1, 60), min_size=1, max_size=8)
SHUFFLED = {"windows": Function("mine", "minillm_data.shuffle_rows:shuffled", ())}


def of_lengths(lengths: list[int]) -> Documents:
    """Build documents with distinct ids."""
    ends = np.cumsum(lengths)
    return Documents.of([range(end - n, end) for n, end in zip(lengths, ends, strict=True)], VOCAB)


def steps(documents: Documents, count: int, by: Any = SHUFFLED, **more: Any) -> list[StepBatch]:
    given = {"rows": 1, "accumulate": 1, "seq_len": 6, "seed": 0} | more
    with Loader(documents, by=by, **given) as loader:
        return list(itertools.islice(loader, count))


def rows(found: list[StepBatch], name: str = "ids") -> np.ndarray:
    return np.concatenate([batch[name] for step in found for batch in step.micro])


@pytest.mark.slow
@given(lengths, st.integers(0, 3), st.integers(1, 9))
@settings(deadline=None, max_examples=50)
def test_rows_are_those_of_documents_end_to_end_in_the_order_of_each_epoch(
    lengths: list[int], seed: int, seq_len: int
) -> None:
    documents = of_lengths(lengths)
    tokens = documents.tokens
    count = 3 * tokens // seq_len + 1
    size = {"seq_len": seq_len, "seed": seed}
    plain, found = steps(documents, count, {}, **size), steps(documents, count, **size)
    read: list[int] = []
    for row in range(count):
        epoch = row * seq_len // tokens
        first, end = -(-epoch * tokens // seq_len), (epoch + 1) * tokens // seq_len
        inside = first <= row < end
        read.append(first + int(shuffled(end - first, seed, epoch)[row - first]) if inside else row)
    there = [row for row, place in enumerate(read) if place < count]
    for name in ("ids", "labels", "documents", "positions"):
        places = [read[row] for row in there]
        np.testing.assert_array_equal(rows(found, name)[there], rows(plain, name)[places])
    stream = rows(found).ravel()
    for epoch in range(2):
        assert sorted(stream[epoch * tokens : (epoch + 1) * tokens].tolist()) == [*range(tokens)]


@pytest.mark.slow
@given(lengths, st.integers(1, 3), st.integers(1, 2), st.integers(0, 10))
@settings(deadline=None, max_examples=50)
def test_any_split_and_any_resume_read_the_same(
    lengths: list[int], rows_: int, accumulate: int, place: int
) -> None:
    documents = of_lengths(lengths)
    one = steps(documents, 12 * rows_ * accumulate)
    split = {"rows": rows_, "accumulate": accumulate}
    several = steps(documents, 12, **split)
    np.testing.assert_array_equal(rows(one), rows(several))
    assert one[-1].cursor == several[-1].cursor
    cursor = json.loads(json.dumps(several[place].cursor))
    resumed = steps(documents, 11 - place, cursor=cursor, **split)
    np.testing.assert_array_equal(rows(resumed), rows(several[place + 1 :]))
    parts = [
        (1.0, documents.part("a", documents.spans)),
        (2.0, documents.part("b", documents.spans)),
    ]
    mixed = steps(documents, 12, parts=parts, **split)
    np.testing.assert_array_equal(rows(mixed)[rows(mixed, "source")[:, 0] == 1][:6], rows(one)[:6])


def test_shorter_rows_read_the_windows_too_and_no_label_leads_into_another_window() -> None:
    documents = of_lengths([50, 31, 47])
    short = {"shape_at": lambda step: minillm_shape(1, 1, 4)}
    found = steps(documents, 32, **short)  # windows of 6, rows of 4
    stream = rows(found).ravel()
    whole = steps(documents, 22)
    np.testing.assert_array_equal(stream, rows(whole).ravel()[: len(stream)])
    labels, ids = rows(found, "labels").ravel(), stream
    joints = [place for place in range(len(ids)) if place % 6 == 5 and place % 4 != 3]
    assert joints
    assert (labels[joints] == -1).all()
    others = np.delete(np.arange(len(ids)), joints)
    assert (labels[others] >= 0).all()


def minillm_shape(*sizes: int) -> Any:
    from minillm_core.config.schema import Shape

    return Shape(*sizes)


@pytest.mark.parametrize("given", [[0, 0], [1.0, 0.0], "no"])
def test_what_is_no_permutation_is_refused_by_name(given: Any) -> None:
    class Wrong(Function):
        def call(self, *asked: Any) -> Any:
            return given

    by = {"windows": Wrong("mine", f"{__name__}:of_lengths", ())}
    with pytest.raises(PluginCodeError, match="not a permutation of the 2 rows") as refused:
        steps(of_lengths([13]), 3, by)
    assert "mine" in str(refused.value)


@pytest.mark.parametrize("other", ["eos_align", "length_buckets"])
def test_rows_are_not_shuffled_behind_a_packer_or_an_order(other: str) -> None:
    loaded = minillm.load("tiny", plugins=["shuffle_rows", other])
    with pytest.raises(PlanError, match=f"which would undo the .* of plugin '{other}'"):
        minillm.build_plan(loaded)
