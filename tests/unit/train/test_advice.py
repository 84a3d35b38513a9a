"""Tests of the advice after running out of memory: it keeps the tokens per step, and suggests no active option."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.config.schema import TrainConfig
from minillm_core.errors import ConfigError, OutOfMemory
from minillm_core.train.errors import check_step, out_of_memory, remedies


def trained(**options: Any) -> TrainConfig:
    """Build train settings, with the schema's defaults for the others."""
    return TrainConfig(**options)


@given(st.integers(2, 4096), st.integers(1, 64))
def test_the_tokens_a_step_stay(rows: int, accumulate: int) -> None:
    train = trained(rows=rows, accumulate=accumulate, seq_len=8, lr=0.1)
    error = out_of_memory(OutOfMemory("cannot allocate"), train, 3 * 2**30, 7)
    assert error.exit_code == 6
    assert "step 7" in error.what
    assert "3.00 GiB" in error.what
    found = re.search(r"train.rows=(\d+) train.accumulate=(\d+)", str(error))
    assert found
    assert int(found[1]) * int(found[2]) == rows * accumulate
    assert int(found[1]) < rows


def test_where_the_model_does_not_fit_rows_are_no_advice() -> None:
    error = out_of_memory(
        OutOfMemory("cannot allocate"), trained(rows=8, seq_len=8, lr=0.1), None, 0
    )
    assert error.what == "out of memory while the model was built"
    assert "a smaller model" in str(error.fix)


def test_tokens_that_fill_the_memory_are_not_to_be_made_more_rows() -> None:
    train = trained(rows=1, accumulate=10**9, seq_len=256, lr=0.1)
    error = out_of_memory(MemoryError(), train, None, 1)
    assert str(error.fix).startswith("a smaller train.accumulate or train.rows: the tokens of one")
    with pytest.raises(ConfigError, match=r"a step of 256,000,000,000 tokens takes 3,814\.7 GiB"):
        check_step(train)
    check_step(trained(rows=64, accumulate=64, seq_len=1024, lr=0.1))


def test_one_row_cannot_be_split() -> None:
    train = trained(rows=1, seq_len=8, lr=0.1)
    assert "train.checkpointing=true" in str(out_of_memory(MemoryError(), train, None, 1))
    train = trained(rows=1, seq_len=8, lr=0.1, checkpointing=True)
    assert "smaller train.seq_len" in str(out_of_memory(MemoryError("x"), train, None, 1))


@pytest.mark.parametrize(
    ("clip", "plugins", "fix"),
    [
        (1.0, [], "lower train.lr, or lengthen train.warmup"),
        (0.0, [], "lower train.lr, lengthen train.warmup, or set train.clip=1.0"),
        (
            5.0,
            ["a", "b"],
            "try without plugins a, b, lower train.lr, lengthen train.warmup, or set",
        ),
        (0.5, ["a"], "try without plugin a, lower train.lr, or lengthen train.warmup"),
    ],
)
def test_what_is_set_already_is_not_advised(clip: float, plugins: list[str], fix: str) -> None:
    train = trained(rows=1, seq_len=8, lr=0.1, clip=clip)
    assert remedies(train, plugins).startswith(f"in a new run: {fix}")
