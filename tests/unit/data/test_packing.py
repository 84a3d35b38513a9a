"""Tests of a packer's rows and an order's epochs: layout, counts, resume, and checks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core.data import Documents, Loader, StepBatch, stream
from minillm_core.data.documents import Arrangement
from minillm_core.errors import DataError, PluginCodeError
from minillm_core.nn.reference import Function
from minillm_core.plugins.sourcing import Packer, Piece

VOCAB = 10_000
FIELDS = ("ids", "labels", "documents", "positions")

lengths = st.lists(st.integers(1, 30), min_size=1, max_size=8)
seeds = st.integers(0, 3)
sizes = st.tuples(st.integers(1, 3), st.integers(1, 3))


def of_lengths(lengths: list[int]) -> Documents:
    """Build documents with distinct ids."""
    ends = np.cumsum(lengths)
    return Documents.of([range(end - n, end) for n, end in zip(lengths, ends, strict=True)], VOCAB)


class Held(Function):
    """A claim without a resolvable reference."""

    def call(self, *given: Any) -> Any:
        return HELD[self.reference](*given)


HELD: dict[str, Any] = {}


def by(packer: Any = None, order: Any = None, capacity: int = 7) -> Arrangement:
    claimed = {"order": order, "packer": packer and (lambda: packer(capacity))}
    HELD.update({f"tests:{name}": one for name, one in claimed.items()})
    given = (("capacity", capacity),)
    return {name: Held("mine", f"tests:{name}", given) for name, one in claimed.items() if one}


def steps(documents: Documents, count: int, how: Arrangement, **more: Any) -> list[StepBatch]:
    given = {"rows": 1, "accumulate": 1, "seq_len": 6, "seed": 0} | more
    with Loader(documents, by=how, **given) as loader:
        return list(itertools.islice(loader, count))


def rows(found: list[StepBatch], name: str) -> np.ndarray:
    return np.concatenate([batch[name] for step in found for batch in step.micro])


def same(one: list[StepBatch], two: list[StepBatch]) -> None:
    for name in FIELDS:
        np.testing.assert_array_equal(rows(one, name), rows(two, name))


class Fuzz(Packer):
    """A packer that cuts, keeps, reorders and drops by a random generator, which is its state."""

    laid: list[list[Piece]]

    def _draw(self, below: int) -> int:
        self.state = (self.state or 11) * 48_271 % 2_147_483_647
        return self.state % below

    def row(self, take: Callable[[], Piece]) -> list[Piece]:
        while len(self.pending) < 4:
            document = take()
            cut = self._draw(document.tokens + 1)
            parts = document.part(0, cut), document.part(cut, document.tokens)
            self.pending += [part for part in parts if part.tokens]
        row, room = [], self.capacity
        for piece in sorted(self.pending, key=lambda piece: self._draw(97)):
            if room and self._draw(3):
                row.append(piece.part(0, room))
                room -= row[-1].tokens
                self.pending.remove(piece)
            elif not self._draw(4):
                self.pending.remove(piece)  # cut
        if not row:
            row = [take().part(0, room)]
        self.laid.append(row)
        return row


def recording(laid: list[list[Piece]]) -> Callable[[int], Packer]:
    def made(capacity: int) -> Packer:
        packer = Fuzz(capacity)
        packer.laid = laid
        return packer

    return made


@given(lengths, seeds, st.integers(1, 9), sizes, st.integers(1, 8))
@settings(deadline=None)
def test_rows_hold_what_the_packer_says(
    reference_stream: Callable,
    lengths: list[int],
    seed: int,
    seq_len: int,
    split: tuple[int, int],
    count: int,
) -> None:
    documents, laid = of_lengths(lengths), []
    size = {"rows": split[0], "accumulate": split[1], "seq_len": seq_len, "seed": seed}
    found = steps(documents, count, by(recording(laid), capacity=seq_len + 1), **size)
    laid = laid[: count * split[0] * split[1]]  # the dataloader is ahead
    ids, starts = reference_stream(documents, seed, max(p.last for row in laid for p in row) + 2)
    supervised = real = 0
    for row, *made in zip(laid, *(rows(found, name) for name in FIELDS), strict=True):
        at = [place for piece in row for place in range(piece.first, piece.last)]
        wanted = np.zeros((3, seq_len + 1), int) - 1
        wanted[0] = 0
        number = 0
        for t, place in enumerate(at):
            jumps = t > 0 and place != at[t - 1] + 1
            number += t > 0 and (jumps or starts[place])
            known = not jumps or (starts[place] and starts[at[t - 1] + 1])
            wanted[:, t] = ids[place], ids[place] if known and t else -1, number
        if len(at) == seq_len:  # the last label is the next token in the text
            wanted[1, seq_len] = ids[at[-1] + 1]
        np.testing.assert_array_equal(made[0], wanted[0, :-1])
        np.testing.assert_array_equal(made[1], wanted[1, 1:])
        np.testing.assert_array_equal(made[2], wanted[2, :-1])
        np.testing.assert_array_equal(made[3], np.arange(seq_len))
        supervised += int((wanted[1, 1:] >= 0).sum())
        real += min(len(at), seq_len)
    assert sum(step.supervised for step in found) == supervised
    assert sum(step.real for step in found) == real
    assert sum(step.padded for step in found) == len(laid) * seq_len


@given(lengths, seeds, st.integers(1, 9), st.integers(1, 9))
@settings(deadline=None)
def test_every_token_that_was_taken_is_in_a_row_pending_or_counted_as_cut(
    lengths: list[int], seed: int, seq_len: int, count: int
) -> None:
    documents, laid = of_lengths(lengths), []
    step = steps(
        documents, count, by(recording(laid), capacity=seq_len + 1), seq_len=seq_len, seed=seed
    )[-1]
    packed, cursor = step.cursor["packed"], step.cursor
    used = [place for row in laid[:count] for piece in row for place in range(*piece)]
    held = [place for piece in packed["pending"] for place in range(*piece)]
    epoch = cursor["epoch"] * documents.tokens
    order = np.random.default_rng(seed + cursor["epoch"]).permutation(len(documents))
    before = documents.lengths[order][: cursor["document"]]
    assert cursor["offset"] == 0
    taken = epoch + int(before.sum())
    assert len({*used, *held}) == len(used) + len(held)
    assert {*used, *held} <= {*range(taken)}
    assert packed["counts"] == {
        "room": sum(max(seq_len, sum(p.tokens for p in row)) for row in laid[:count]),
        "taken": taken,
        "used": len(used),
        "cut": taken - len(used) - len(held),
        "split": packed["counts"]["split"],
    }


@pytest.mark.slow
@given(lengths, seeds, sizes, st.integers(1, 6), st.integers(1, 4))
@settings(deadline=None)
def test_a_resumed_loader_goes_on_at_every_step(
    lengths: list[int], seed: int, split: tuple[int, int], before: int, after: int
) -> None:
    documents, how = of_lengths(lengths), by(recording([]))
    size = {"rows": split[0], "accumulate": split[1], "seed": seed}
    whole = steps(documents, before + after, how, **size)
    cursor = json.loads(json.dumps(whole[before - 1].cursor))
    resumed = steps(documents, after, how, cursor=cursor, **size)
    same(resumed, whole[before:])
    assert resumed[-1].cursor == whole[-1].cursor


@pytest.mark.slow
@given(lengths, seeds, sizes)
@settings(deadline=None)
def test_rows_are_the_same_however_they_are_split_into_steps(
    lengths: list[int], seed: int, split: tuple[int, int]
) -> None:
    documents, how = of_lengths(lengths), by(recording([]))
    rows_, accumulate = split
    one = steps(documents, 4 * rows_ * accumulate, how, seed=seed)
    several = steps(documents, 4, how, seed=seed, rows=rows_, accumulate=accumulate)
    same(one, several)
    assert one[-1].cursor == several[-1].cursor


class Windows(Packer):
    """Contiguous documents, as without a packer, except for the label-only token."""

    def row(self, take: Callable[[], Piece]) -> list[Piece]:
        while sum(piece.tokens for piece in self.pending) < self.capacity:
            self.pending.append(take())
        row, room = [], self.capacity
        while room:
            piece = self.pending.pop(0)
            row.append(piece.part(0, room))
            room -= row[-1].tokens
            if row[-1] != piece:
                self.pending.insert(0, piece.part(row[-1].tokens, piece.tokens))
        return row


@given(lengths, seeds, st.integers(1, 5))
@settings(deadline=None)
def test_documents_end_to_end_by_a_packer_are_the_stream(
    reference_stream: Callable, lengths: list[int], seed: int, count: int
) -> None:
    documents = of_lengths(lengths)
    found = steps(documents, count, by(Windows), seed=seed, seq_len=6)
    wanted, starts = reference_stream(documents, seed, count * 7)
    wanted, starts = wanted.reshape(count, 7), starts.reshape(count, 7)
    np.testing.assert_array_equal(rows(found, "ids"), wanted[:, :-1])
    np.testing.assert_array_equal(rows(found, "labels"), wanted[:, 1:])
    starts[:, 0] = False
    np.testing.assert_array_equal(rows(found, "documents"), np.cumsum(starts, axis=1)[:, :-1])
    assert found[-1].cursor["packed"]["counts"]["cut"] == 0


def shortest_first(lengths: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    shuffled = np.random.default_rng((seed, epoch)).permutation(len(lengths))
    return shuffled[np.argsort(lengths[shuffled], kind="stable")]


@given(lengths, seeds, sizes, st.integers(1, 5), st.integers(1, 5))
@settings(deadline=None)
def test_documents_come_in_the_order_that_is_claimed_and_resume_in_it(
    lengths: list[int], seed: int, split: tuple[int, int], before: int, after: int
) -> None:
    documents, how = of_lengths(lengths), by(order=shortest_first)
    size = {"rows": split[0], "accumulate": split[1], "seed": seed}
    found = steps(documents, before + after, how, **size)
    read, epoch = rows(found, "ids").ravel(), 0
    wanted: list[int] = []
    while len(wanted) < len(read):
        order = shortest_first(documents.lengths, seed, epoch)
        wanted += [i for index in order for i in documents[index].tolist()]
        epoch += 1
    assert read.tolist() == wanted[: len(read)]
    resumed = steps(documents, after, how, cursor=found[before - 1].cursor, **size)
    same(resumed, found[before:])


@pytest.mark.parametrize(
    "order",
    [
        lambda lengths, seed, epoch: np.zeros(len(lengths), int),
        lambda lengths, seed, epoch: np.arange(len(lengths))[1:],
        lambda lengths, seed, epoch: np.arange(len(lengths)) + 1,
        lambda lengths, seed, epoch: np.arange(len(lengths)) * 1.0,
        lambda lengths, seed, epoch: None,
    ],
)
def test_an_order_that_is_no_permutation_is_refused(order: Any) -> None:
    with pytest.raises(PluginCodeError, match="epoch 0: not a permutation of the 3 documents"):
        steps(of_lengths([3, 4, 5]), 1, by(order=order))


def test_an_order_may_do_what_it_likes_with_the_lengths() -> None:
    def careless(lengths: np.ndarray, seed: int, epoch: int) -> np.ndarray:
        lengths[:] = 0
        return np.arange(len(lengths))

    documents = of_lengths([3, 4, 5])
    read = rows(steps(documents, 3, by(order=careless), seq_len=4), "ids").ravel()
    assert read.tolist() == [*range(12)]


def test_a_cursor_of_another_arrangement_is_refused() -> None:
    documents = of_lengths([3, 4, 5])
    cursor = steps(documents, 1, by(Windows))[-1].cursor
    other = {"packer": Function("mine", "tests:another", (("capacity", 7),))}
    for how in (other, {}, by(Windows, capacity=8)):
        with pytest.raises(DataError, match="differ from those that the run was reading"):
            steps(documents, 1, how, cursor=cursor)


def returning(row: Callable[[Packer, Callable[[], Piece]], Any]) -> Callable[[int], Packer]:
    class Given(Packer):
        def row(self, take: Callable[[], Piece]) -> Any:
            return row(self, take)

    return Given


def endless(packer: Packer, take: Callable[[], Piece]) -> None:
    while True:
        take()


def twice(packer: Packer, take: Callable[[], Piece]) -> list[Piece]:
    piece = take()
    return [piece.part(0, 1), piece.part(0, 1), piece]


def remembered(packer: Packer, take: Callable[[], Piece]) -> list[Piece]:
    """Return its first document repeatedly: neither used in this row nor pending."""
    if "first" not in vars(packer):
        vars(packer)["first"] = take()
    return [vars(packer)["first"]]


def keeps(**kept: Any) -> Callable[[Packer, Callable[[], Piece]], list[Piece]]:
    def row(packer: Packer, take: Callable[[], Piece]) -> list[Piece]:
        vars(packer).update(kept)
        return [take()]

    return row


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (lambda packer, take: None, "None is not a row"),
        (lambda packer, take: [], r"\[\] is not a row"),
        (lambda packer, take: take(), "0 is not a piece"),
        (lambda packer, take: [(0, 3)], "is not a piece of a document"),
        (lambda packer, take: [take().part(1, 1)], "is not a piece of a document"),
        (lambda packer, take: [take()._replace(first=-1)], "is not a piece of a document"),
        (lambda packer, take: [take().part(9, 3)], "is not a piece of a document"),
        (lambda packer, take: [Piece(0, take().last + 1)], "is not a piece of a document"),
        (lambda packer, take: [take(), take(), take()], "a row of 9 tokens, but only 7 fit"),
        (endless, "500 documents were taken for one row"),
        (twice, "2 tokens were laid out twice"),
        (remembered, "3 tokens were laid out twice"),
        (lambda packer, take: [take().part(0, 1.5)], "is not a piece of a document"),
        (lambda packer, take: [take().part(0, np.int64(2))], "is not a piece of a document"),
        (keeps(state={1, 2}), "pending and state cannot be kept: Object of type set"),
        (keeps(state=float("nan")), "pending and state cannot be kept: Out of range float"),
        (keeps(pending=[Piece(0, np.int64(3))]), "cannot be kept"),  # type: ignore[arg-type]
        (keeps(pending=None), "cannot be kept"),
        (keeps(pending=[3]), "cannot be kept"),
        (keeps(pending=[Piece(0, 3)]), "3 tokens were laid out twice"),
    ],
)
def test_what_is_no_row_is_refused(row: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MOST", 500)
    with pytest.raises(PluginCodeError, match=said) as broken:
        steps(of_lengths([3, 3, 3]), 2, by(returning(row)))
    assert broken.value.plugin == "mine"


def test_a_state_is_after_a_step_what_a_resumed_run_would_find() -> None:
    seen: list[Any] = []

    def row(packer: Packer, take: Callable[[], Piece]) -> list[Piece]:
        seen.append(packer.state)
        packer.state = {1: (2, 3)}
        return [take()]

    steps(of_lengths([3]), 2, by(returning(row)))
    assert seen[:2] == [None, {"1": [2, 3]}]


SHAPES = ((1, 2, 6), (3, 1, 2), (2, 1, 5), (1, 1, 11))
"""rows, accumulate, seq_len."""


@pytest.mark.slow
@given(
    lengths,
    seeds,
    st.lists(st.sampled_from(SHAPES), min_size=1, max_size=6),
    st.sampled_from([None, Windows, recording([])]),
    st.data(),
)
@settings(deadline=None)
def test_rows_of_changing_lengths_are_the_same_when_resumed_at_any_step(
    lengths: list[int], seed: int, plan: list[Any], packer: Any, data: st.DataObject
) -> None:
    documents, how = of_lengths(lengths), by(packer, capacity=12)

    def shape_at(step: int) -> Any:
        return plan[min(step, len(plan)) - 1]

    # a batch without labels is not a step: the next one has the sizes of the same step
    empty = data.draw(st.sets(st.integers(1, 12)))

    def unlabelled(batch: dict[str, Any], phase: str) -> dict[str, Any]:
        gone = int(batch["ids"].sum()) % 13 in empty
        return {**batch, "labels": np.full_like(batch["labels"], -1)} if gone else batch

    given = {"shape_at": shape_at, "seed": seed, "on_batch": unlabelled}
    whole, step = steps(documents, 9, how, **given), 0
    done = [0]
    for one in whole:
        rows_, accumulate, seq_len = shape_at(step + 1)
        assert [batch["ids"].shape for batch in one.micro] == [(rows_, seq_len)] * accumulate
        step += one.supervised > 0
        done.append(step)
    at = data.draw(st.integers(1, 8))
    cursor = json.loads(json.dumps(whole[at - 1].cursor))
    resumed = steps(documents, 9 - at, how, cursor=cursor, step=done[at], **given)
    for one, other in zip(whole[at:], resumed, strict=True):
        assert (one.cursor, one.real, one.supervised) == (
            other.cursor,
            other.real,
            other.supervised,
        )
        for batch, again in zip(one.micro, other.micro, strict=True):
            for name in FIELDS:
                np.testing.assert_array_equal(batch[name], again[name])


@given(lengths, seeds, st.lists(st.sampled_from(SHAPES), min_size=3, max_size=3))
@settings(deadline=None)
def test_rows_of_changing_lengths_are_pieces_of_the_stream_one_after_the_other(
    reference_stream: Callable, lengths: list[int], seed: int, plan: list[Any]
) -> None:
    documents = of_lengths(lengths)
    found = steps(documents, 3, by(), seed=seed, shape_at=lambda step: plan[min(step, 3) - 1])
    tokens = sum(rows_ * accumulate * seq_len for rows_, accumulate, seq_len in plan)
    ids, _ = reference_stream(documents, seed, tokens + 1)
    for name, wanted in (("ids", ids[:tokens]), ("labels", ids[1 : tokens + 1])):
        laid = [row for step in found for batch in step.micro for row in batch[name]]
        np.testing.assert_array_equal(np.concatenate(laid), wanted)


def test_a_packer_is_told_the_capacity_of_each_row() -> None:
    told = []

    class Told(Windows):
        def row(self, take: Callable[[], Piece]) -> list[Piece]:
            told.append(self.capacity)
            return super().row(take)

    steps(of_lengths([30]), 4, by(Told), shape_at=lambda step: SHAPES[min(step, 4) - 1])
    assert told[:7] == [7, 7, 3, 3, 3, 6, 6]
