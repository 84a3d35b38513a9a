"""Tests of the dataloader: the stream's rows in steps, its thread, its failures, its end."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.data import Batch, Cancelled, Documents, Loader
from minillm_core.errors import DataError

VOCAB = 1000
LISTS = [[0, *range(10 * n, 10 * n + 5 * n + 1)] for n in range(1, 9)]


@pytest.fixture
def documents() -> Documents:
    return Documents.of(LISTS, VOCAB)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    deadline = time.monotonic() + 10
    while any(thread.name == "minillm-loader" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "a loader's thread is still there"
        time.sleep(0.01)


def flat(steps: list, name: str) -> np.ndarray:
    return np.concatenate([batch[name].reshape(-1) for step in steps for batch in step.micro])


sizes = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 12))


@given(sizes, st.integers(1, 5), st.integers(0, 3), st.integers(0, 4))
def test_steps_are_the_stream_for_any_split(
    reference_stream: Callable, size: tuple[int, int, int], count: int, seed: int, prefetch: int
) -> None:
    documents = Documents.of(LISTS, VOCAB)
    rows, accumulate, seq_len = size
    tokens = rows * accumulate * seq_len
    expected, _ = reference_stream(documents, seed, count * tokens + 1)
    with Loader(
        documents, rows=rows, accumulate=accumulate, seq_len=seq_len, seed=seed, prefetch=prefetch
    ) as loader:
        steps = list(itertools.islice(loader, count))
    np.testing.assert_array_equal(flat(steps, "ids"), expected[:-1])
    np.testing.assert_array_equal(flat(steps, "labels"), expected[1:])
    for step in steps:
        assert len(step.micro) == accumulate
        assert all(batch["ids"].shape == (rows, seq_len) for batch in step.micro)
        assert (step.supervised, step.real, step.padded) == (tokens, tokens, tokens)


@given(sizes, sizes, st.integers(1, 4), st.integers(1, 4))
def test_a_cursor_resumes_under_another_split(
    reference_stream: Callable,
    first: tuple[int, int, int],
    second: tuple[int, int, int],
    before: int,
    after: int,
) -> None:
    documents = Documents.of(LISTS, VOCAB)
    names = ("rows", "accumulate", "seq_len")
    with Loader(documents, seed=1, **dict(zip(names, first, strict=True))) as loader:
        begun = list(itertools.islice(loader, before))
    cursor = begun[-1].cursor
    with Loader(
        documents, seed=1, cursor=cursor, **dict(zip(names, second, strict=True))
    ) as loader:
        resumed = list(itertools.islice(loader, after))
    read = np.concatenate([flat(begun, "ids"), flat(resumed, "ids")])
    np.testing.assert_array_equal(read, reference_stream(documents, 1, len(read))[0])


def test_on_batch_gets_every_micro_batch_in_order_in_the_thread(documents: Documents) -> None:
    seen: list[tuple[str, str, int]] = []

    def on_batch(batch: Batch, phase: str) -> Batch:
        seen.append((threading.current_thread().name, phase, int(batch["ids"][0, 0])))
        batch["labels"][0, : len(seen)] = -1  # another number in each micro-batch
        batch["documents"][-1, -1] = -1
        return batch

    with Loader(documents, rows=2, accumulate=2, seq_len=5, seed=0, on_batch=on_batch) as loader:
        step = next(loader)
    firsts = [int(batch["ids"][0, 0]) for batch in step.micro]
    assert seen[:2] == [("minillm-loader", "train", first) for first in firsts]
    assert (step.supervised, step.real, step.padded) == (20 - 1 - 2, 20 - 2, 20)


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(0), KeyboardInterrupt()])
def test_what_the_thread_raises_is_raised_again(documents: Documents, error: BaseException) -> None:
    calls = itertools.count()

    def on_batch(batch: Batch, phase: str) -> Batch:
        if next(calls) == 2:
            raise error from OSError("the cause")
        return batch

    loader = Loader(documents, rows=1, accumulate=1, seq_len=4, seed=0, on_batch=on_batch)
    next(loader)
    next(loader)
    for _ in range(2):
        with pytest.raises(type(error)) as raised:
            next(loader)
        assert raised.value is error
        assert isinstance(raised.value.__cause__, OSError)
    assert "on_batch" in {entry.name for entry in raised.traceback}


def replaced(**fields: object) -> Callable[[Batch, str], object]:
    return lambda batch, phase: {**batch, **fields}


@pytest.mark.parametrize(
    ("on_batch", "said"),
    [
        (lambda batch, phase: None, "NoneType"),
        (lambda batch, phase: {"ids": batch["ids"]}, "no array 'labels'"),
        (replaced(ids=[[1, 2, 3, 4]]), "no array 'ids'"),
        (replaced(ids=np.full((1, 4), VOCAB, np.int32)), f"model.vocab={VOCAB}"),
        (replaced(ids=np.full((1, 4), -1, np.int32)), "'ids' from -1"),
        (replaced(labels=np.full((1, 4), VOCAB, np.int32)), "'labels'"),
        (replaced(labels=np.zeros((1, 4), np.int64)), "int64"),
        (replaced(labels=np.zeros((1, 3), np.int32)), "(1, 3)"),
    ],
)
def test_what_on_batch_returns_is_checked(
    documents: Documents, on_batch: Callable, said: str
) -> None:
    with (
        Loader(documents, rows=1, accumulate=1, seq_len=4, seed=0, on_batch=on_batch) as loader,
        pytest.raises(DataError) as raised,
    ):
        next(loader)
    assert said in str(raised.value)


def test_prefetching_is_bounded(documents: Documents) -> None:
    made = itertools.count()
    latest = 0

    def on_batch(batch: Batch, phase: str) -> Batch:
        nonlocal latest
        latest = next(made)
        return batch

    with Loader(
        documents, rows=1, accumulate=1, seq_len=4, seed=0, prefetch=3, on_batch=on_batch
    ) as loader:
        for _ in range(20):
            next(loader)
        time.sleep(0.2)
        assert latest <= 20 + 3  # three in the queue, one blocked


def test_a_closed_loader_is_at_its_end(documents: Documents) -> None:
    loader = Loader(documents, rows=1, accumulate=1, seq_len=4, seed=0)
    next(loader)
    loader.close()
    loader.close()
    assert list(loader) == []


def test_a_forgotten_loader_ends_its_thread(documents: Documents) -> None:
    next(Loader(documents, rows=1, accumulate=1, seq_len=4, seed=0))


def test_a_wrong_cursor_starts_no_thread(documents: Documents) -> None:
    other = {"fingerprint": "0" * 32, "epoch": 0, "document": 0, "offset": 0}
    with pytest.raises(DataError, match="data differ from those"):
        Loader(documents, rows=1, accumulate=1, seq_len=4, seed=0, cursor=other)


def test_nobody_has_to_wait_for_a_hook_that_hangs(documents: Documents) -> None:
    goes_on, asked = threading.Event(), itertools.count()

    def hang(batch: Batch, phase: str) -> Batch:
        goes_on.wait(10)
        return batch

    loader = Loader(
        documents,
        **{"rows": 1, "accumulate": 1, "seq_len": 4, "seed": 0, "on_batch": hang},
        cancelled=lambda: next(asked) > 1,
    )
    with pytest.raises(Cancelled):
        next(loader)
    loader.close(0.01)  # and the thread is abandoned
    goes_on.set()


def test_a_step_that_nobody_waited_for_still_comes(documents: Documents) -> None:
    goes_on = threading.Event()

    def slow(batch: Batch, phase: str) -> Batch:
        goes_on.wait(10)
        return batch

    sizes: dict[str, Any] = {"rows": 1, "accumulate": 1, "seq_len": 4, "seed": 0}
    with Loader(documents, **sizes) as loader:
        first = next(loader)
    with Loader(
        documents, **sizes, on_batch=slow, cancelled=lambda: not goes_on.is_set()
    ) as loader:
        with pytest.raises(Cancelled):
            next(loader)
        goes_on.set()
        np.testing.assert_array_equal(next(loader).micro[0]["ids"], first.micro[0]["ids"])
