"""Tests of loss per token and bits per byte against explicit sums."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.errors import DataError
from minillm_core.train.validation import Validation


def batch(labels: list[list[int]]) -> dict[str, np.ndarray]:
    array = np.asarray(labels, np.int32)
    return {"ids": np.zeros_like(array), "labels": array}


@given(
    st.lists(
        st.lists(st.integers(-1, 7), min_size=3, max_size=3).map(lambda row: [row]),
        min_size=1,
        max_size=4,
    )
)
def test_bits_per_byte(bigram, rows: list) -> None:
    batches = [batch(each) for each in rows]
    token_bytes = np.asarray([0, 1, 1, 2, 3, 4, 5, 9], np.int32)
    labels = np.concatenate([each["labels"].ravel() for each in batches])
    labels = labels[labels >= 0]
    validation = Validation(bigram(), {"": batches}, token_bytes)
    if not len(labels):
        with pytest.raises(DataError, match="nothing to predict in the evaluation"):
            validation(3)
        return
    found = validation(3)
    assert found is not None
    assert found.step == 3
    assert validation.predictions == len(labels)
    total = int(token_bytes[labels].sum())
    assert found.val_loss == pytest.approx(math.log(8))  # untrained: uniform over 8
    if total:
        bits = len(labels) * math.log(8) / math.log(2) / total
        assert found.bits_per_byte == pytest.approx(bits)
    else:
        assert found.bits_per_byte is None


def test_the_space_that_a_tokenizer_puts_in_front_of_a_document_is_not_of_its_text(bigram) -> None:
    token_bytes = np.asarray([-1, 1, 1, 2, 3, 4, 5, 9], np.int32)  # 0 is the end-of-text id
    row = {"ids": [[0, 4, 3, 0, 6, 0, 5]], "labels": [[4, 3, 0, 6, 0, -1, 1]]}
    given = {name: np.asarray(array, np.int32) for name, array in row.items()}
    found = Validation(bigram(), {"": [given]}, token_bytes)(1)
    assert found is not None
    text = (3 - 1) + 2 + (5 - 1) + 1
    assert found.bits_per_byte == pytest.approx(6 * 3.0 / text)
    ends = Validation(bigram(), {"": [batch([[0, 0, -1]])]}, token_bytes)(1)
    assert ends is not None
    assert ends.bits_per_byte is None


def test_without_a_tokenizer_there_are_no_bytes(bigram) -> None:
    found = Validation(bigram(), {"": [batch([[1, 2, 3]])]}, None)(1)
    assert found is not None
    assert found.bits_per_byte is None
    assert found.val_loss == pytest.approx(math.log(8))


def test_it_can_be_asked_again(bigram) -> None:
    validation = Validation(bigram(), {"": [batch([[1, 2, 3]])]}, np.ones(8, np.int32))
    for step in (1, 2):
        found = validation(step)
        assert found is not None
        assert found.bits_per_byte == pytest.approx(3.0)


def test_a_mixture_is_the_mean_of_its_sources_by_weight(bigram) -> None:
    batches = {"a": [batch([[1, 2, 3]])], "b": [batch([[4, -1, -1]])], "c": [batch([[-1] * 3])]}
    model, token_bytes = bigram(), np.asarray([0, 1, 1, 2, 3, 4, 5, 9], np.int32)
    weights = {"a": 3.0, "b": 1.0, "c": 9.0}  # c has no predictions, so no effect
    each = {name: Validation(model, {"": batches[name]}, token_bytes)(1) for name in ("a", "b")}
    found = Validation(model, batches, token_bytes, weights=weights)(1)
    assert found is not None
    assert found.tokens == 4
    losses = {name: one.val_loss for name, one in each.items() if one}
    assert found.val_loss == pytest.approx((3 * losses["a"] + losses["b"]) / 4)
    bits = found.val_loss / math.log(2) / ((3 * (4 / 3) + 3) / 4)  # 4/3 and 3 bytes per token
    assert found.bits_per_byte == pytest.approx(bits)
    assert {name: one["val_loss"] for name, one in found.sources.items()} == losses
    assert found.data()["sources"]["b"] == {
        "val_loss": losses["b"],
        "bits_per_byte": each["b"] and each["b"].bits_per_byte,
        "tokens": 1,
    }


def test_who_took_the_labels_is_named(bigram) -> None:
    batches, seen = [batch([[-1, -1, -1]])], Counter({"batch:sft": 3, "unlabelled:sft": 1})
    with pytest.raises(DataError) as refused:
        Validation(bigram(), {"": batches}, None, text="val.txt", seen=seen)(0)
    assert "every label is -1 after on_batch of 'sft'" in refused.value.what
    assert (refused.value.where, refused.value.exit_code) == ("val.txt", 2)
    with pytest.raises(DataError, match=r"train data\.val=PATH, eval --data"):
        Validation(bigram(), {"": batches}, None, text="val.txt", seen=Counter())(0)


def test_it_tells_how_far_it_is(bigram) -> None:
    told: list[int] = []
    batches = [batch([[1, 2, -1]]), batch([[3, -1, -1]]), batch([[1, 1, 1]])]
    Validation(bigram(), {"": batches}, None, progress=told.append)(1)
    assert told == [0, 2, 3]
