"""best_fit, eos_align, length_buckets and length_curriculum: invariants of rows and order, and costs."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minillm_core import DataError, Packer, Piece, Plan, PlanError, PluginError, build_plan, load
from minillm_core.inspection import Documents, Loader, StepBatch
from minillm_data import length_curriculum
from minillm_data.best_fit import BestFitPacker
from minillm_data.eos_align import EosAlignPacker
from minillm_data.length_buckets import bucketed
from minillm_data.length_curriculum import LengthPacker, drawn

VOCAB = 512
SMALL = {
    **{"model.vocab": VOCAB, "model.dim": 32, "model.layers": 1, "model.heads": 2},
    **{"model.kv_heads": 2, "model.hidden": 32, "train.steps": 10},
}

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=12)
capacities = st.integers(2, 20)
seeds = st.integers(0, 3)
splits = st.tuples(st.integers(1, 3), st.integers(1, 3))


class Stream:
    """An endless stream of documents of given lengths, as a packer takes them."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths, self.taken = itertools.cycle(lengths), list[Piece]()

    def take(self) -> Piece:
        first = self.taken[-1].last if self.taken else 0
        self.taken.append(Piece(first, first + next(self.lengths)))
        return self.taken[-1]

    @property
    def starts(self) -> set[int]:
        return {piece.first for piece in self.taken}


def used_once(rows: list[list[Piece]], stream: Stream, packer: Packer) -> int:
    """Check that no token is in two rows; count the tokens neither in a row nor pending."""
    tokens = Counter(t for row in rows for piece in row for t in range(*piece))
    assert all(count == 1 for count in tokens.values())
    pending = {t for piece in packer.pending for t in range(*piece)}
    assert not pending & tokens.keys()
    taken = {*range(stream.taken[-1].last)}
    assert tokens.keys() | pending <= taken
    return len(taken) - len(tokens) - len(pending)


@given(lengths, capacities, st.integers(1, 9), st.integers(1, 30))
def test_best_fit_splits_no_document_that_fits_and_loses_no_token(
    lengths: list[int], capacity: int, buffer: int, count: int
) -> None:
    stream, packer = Stream(lengths), BestFitPacker(capacity, buffer)
    rows = [packer.row(stream.take) for _ in range(count)]
    whole = {*stream.taken}
    for row in rows:
        assert sum(piece.tokens for piece in row) <= capacity
        for piece in row:
            (document,) = (d for d in whole if d.first <= piece.first < d.last)
            if document.tokens <= capacity:
                assert piece == document
            else:  # cut at every capacity tokens
                assert (piece.first - document.first) % capacity == 0
                assert piece.tokens == min(capacity, document.last - piece.first)
    assert used_once(rows, stream, packer) == 0


@given(lengths, capacities, st.integers(1, 9), st.integers(1, 20))
def test_best_fit_begins_with_the_oldest_and_takes_the_largest_that_fits(
    lengths: list[int], capacity: int, buffer: int, count: int
) -> None:
    stream, packer = Stream(lengths), BestFitPacker(capacity, buffer)
    waiting: list[Piece] = []

    def take() -> Piece:
        document = stream.take()
        tail = document.tokens // capacity * capacity
        pieces = document.part(0, tail), document.part(tail, document.tokens)
        waiting.extend(piece for piece in pieces if piece.tokens)
        return document

    for _ in range(count):
        known = [*waiting]
        row = packer.row(take)
        oldest = min(known or waiting)
        waiting.remove(oldest)
        assert row[0] == oldest.part(0, capacity)
        if oldest.tokens > capacity:
            waiting.append(oldest.part(capacity, oldest.tokens))
        for piece in row[1:]:
            waiting.remove(piece)
        assert sorted(waiting) == sorted(packer.pending)
        assert buffer <= len(packer.pending) <= buffer + 1  # a checkpoint stores all pieces
        room = capacity - sum(piece.tokens for piece in row)
        assert all(piece.tokens > room for piece in packer.pending)
        # after the first, each piece was the largest of the remaining ones that fit
        for place, piece in enumerate(row[1:], 1):
            before = capacity - sum(one.tokens for one in row[:place])
            had = [one for one in packer.pending if one in known and one.tokens <= before]
            assert piece.tokens >= max((one.tokens for one in had), default=0)


def test_no_document_waits_for_more_rows_than_the_buffer_holds() -> None:
    """Check the wait: if the largest were taken first, 55 would wait behind every 60."""
    stream, packer = Stream([55] + [60] * 400), BestFitPacker(100, 20)
    rows = [packer.row(stream.take) for _ in range(60)]
    assert next(n for n, row in enumerate(rows) if Piece(0, 55) in row) <= 20


@given(lengths, capacities, st.data())
def test_eos_align_begins_every_row_with_a_document(
    lengths: list[int], capacity: int, data: st.DataObject
) -> None:
    longest = data.draw(st.integers(1, capacity))
    stream, packer = Stream(lengths), EosAlignPacker(capacity, longest)
    rows = [packer.row(stream.take) for _ in range(8)]
    assert packer.pending == []
    kept = 0
    for row in rows:
        assert sum(piece.tokens for piece in row) == capacity
        assert {piece.first for piece in row} <= stream.starts
        assert all(piece.tokens <= longest for piece in row)
        kept += capacity
        for piece in row[:-1]:  # only the last one is cut by the row's end
            (document,) = (d for d in stream.taken if d.first == piece.first)
            assert piece.tokens == min(document.tokens, longest)
    assert used_once(rows, stream, packer) == stream.taken[-1].last - kept


@given(st.lists(st.integers(1, 500), max_size=60), seeds, seeds, st.integers(2, 20))
def test_length_buckets_are_a_permutation_sorted_within_each(
    lengths: list[int], seed: int, epoch: int, size: int
) -> None:
    array = np.array(lengths, np.int64)
    order = bucketed(array, seed, epoch, documents=size)
    assert sorted(order.tolist()) == [*range(len(lengths))]
    for first in range(0, len(lengths), size):
        assert (np.diff(array[order[first : first + size]]) >= 0).all()
    assert (order == bucketed(array, seed, epoch, documents=size)).all()


def test_another_seed_and_another_epoch_are_another_order() -> None:
    array = np.random.default_rng(0).integers(1, 99, 500)
    orders = [bucketed(array, s, e, documents=50).tolist() for s in (0, 1) for e in (0, 1)]
    assert len({*map(tuple, orders)}) == 4


PLANS: dict[tuple[Any, ...], Any] = {}


def planned(plugins: list[str], **settings: Any) -> Any:
    key = (*plugins, *settings.items())
    if key not in PLANS:
        given = {**SMALL, **{name.replace("__", "."): v for name, v in settings.items()}}
        PLANS[key] = build_plan(load("tiny", settings=given, plugins=plugins))
    return PLANS[key]


def steps(plan: Any, documents: Documents, count: int, cursor: Any = None) -> list[StepBatch]:
    train = plan.config.train
    sizes = {"rows": train.rows, "accumulate": train.accumulate, "seq_len": train.seq_len}
    given = {**sizes, "seed": plan.config.data.seed, "by": plan.arrangement, "cursor": cursor}
    with Loader(documents, **given) as loader:
        return [next(loader) for _ in range(count)]


def rows(found: list[StepBatch], name: str) -> np.ndarray:
    return np.concatenate([batch[name] for step in found for batch in step.micro])


SETS = (["best_fit"], ["eos_align"], ["length_buckets"], ["best_fit", "length_buckets"])


@pytest.mark.broad(1)
@pytest.mark.parametrize("plugins", SETS, ids="+".join)
@given(lengths, splits, st.integers(1, 4), st.integers(1, 3))
@settings(deadline=None, max_examples=15)
def test_rows_do_not_depend_on_their_split_and_resume_at_every_step(
    plugins: list[str], lengths: list[int], split: tuple[int, int], before: int, after: int
) -> None:
    documents = of_lengths(lengths)
    sizes = {"train__rows": split[0], "train__accumulate": split[1], "train__seq_len": 8}
    one_by_one = planned(plugins, train__rows=1, train__accumulate=1, train__seq_len=8)
    plan = planned(plugins, **sizes)
    whole = steps(plan, documents, before + after)
    single = steps(one_by_one, documents, (before + after) * split[0] * split[1])
    resumed = steps(plan, documents, after, json.loads(json.dumps(whole[before - 1].cursor)))
    for name in ("ids", "labels", "documents"):
        np.testing.assert_array_equal(rows(whole, name), rows(single, name))
        np.testing.assert_array_equal(rows(whole[before:], name), rows(resumed, name))
    assert whole[-1].cursor["document"] == single[-1].cursor["document"]
    assert resumed[-1].cursor == whole[-1].cursor


def of_lengths(lengths: list[int]) -> Documents:
    return Documents.of([[0, *range(1, n)] for n in lengths], VOCAB)


def test_every_document_of_an_epoch_is_taken_once_before_the_next_epoch() -> None:
    documents = Documents.of([[n, n, n] for n in range(1, 30)], VOCAB)
    plan = planned(["best_fit"], best_fit__buffer=1, train__rows=1, train__seq_len=2)
    read = rows(steps(plan, documents, 58), "ids")[:, 0].tolist()
    assert sorted(read[:29]) == sorted(read[29:]) == [*range(1, 30)]
    assert read[:29] != read[29:]
    assert read[:29] == (np.random.default_rng(0).permutation(29) + 1).tolist()


@pytest.mark.parametrize("plugins", SETS, ids="+".join)
def test_another_seed_is_another_order(plugins: list[str]) -> None:
    documents = of_lengths([*range(1, 60)])
    given: dict[str, Any] = {"train__seq_len": 8}
    if "length_buckets" in plugins:
        given["length_buckets__documents"] = 10  # one bucket of all has one order
    plans = [planned(plugins, data__seed=seed, **given) for seed in (0, 1)]
    found = [rows(steps(plan, documents, 4), "ids") for plan in plans]
    assert not np.array_equal(*found)


def test_padding_and_cut_tokens_are_counted() -> None:
    documents = of_lengths([5, 5, 5])
    sizes = {"train__rows": 2, "train__accumulate": 1, "train__seq_len": 7}
    (step,) = steps(planned(["best_fit"], best_fit__buffer=1, **sizes), documents, 1)
    assert (step.real, step.padded, step.supervised) == (10, 14, 8)
    counts = step.cursor["packed"]["counts"]
    assert counts == {"room": 14, "taken": 15, "used": 10, "cut": 0, "split": 0}
    (step,) = steps(planned(["eos_align"], **sizes), documents, 1)
    assert (step.real, step.padded, step.supervised) == (14, 14, 14)
    counts = step.cursor["packed"]["counts"]
    assert counts == {"room": 16, "taken": 20, "used": 16, "cut": 4, "split": 0}
    (step,) = steps(planned(["best_fit"], best_fit__buffer=1, **sizes), of_lengths([20]), 1)
    assert step.cursor["packed"]["counts"]["split"] == 1  # 8, 8 and 4 tokens


def test_two_packers_are_refused_by_both_names() -> None:
    with pytest.raises(
        PlanError, match=r"slot data\.packer is claimed by both 'best_fit' and 'eos_align'"
    ):
        planned(["best_fit", "eos_align"])


@pytest.mark.parametrize("longest", [9, 1000])
def test_a_maximum_that_cuts_nothing_is_refused(longest: int) -> None:
    with pytest.raises(
        PlanError, match=f"eos_align.max_document={longest} cuts nothing"
    ) as refused:
        planned(["eos_align"], train__seq_len=8, eos_align__max_document=longest)
    assert "below 9" in str(refused.value)
    planned(["eos_align"], train__seq_len=8, eos_align__max_document=8)


@pytest.mark.parametrize(
    ("plugin", "option", "value"),
    [
        ("best_fit", "buffer", 0),
        ("eos_align", "max_document", 0),
        ("length_buckets", "documents", 1),
    ],
)
def test_an_option_out_of_range_is_refused(plugin: str, option: str, value: int) -> None:
    with pytest.raises(PluginError, match=option):
        planned([plugin], **{f"{plugin}__{option}": value})


@pytest.mark.parametrize("plugin", ["best_fit", "eos_align", "length_buckets"])
def test_options_are_in_the_plans_hash_and_the_source_in_its_digests(plugin: str) -> None:
    option = {"best_fit": "buffer", "eos_align": "max_document", "length_buckets": "documents"}
    other = {f"{plugin}__{option[plugin]}": 7}
    plain, one, two = planned([]), planned([plugin]), planned([plugin], **other)
    assert len({plan.hash for plan in (plain, one, two)}) == 3
    assert f"minillm_data.{plugin}" in one.digests
    (name,) = {*one.data()["data"]} & {"order", "packer"}
    assert one.data()["data"][name][0] == plugin
    assert {*plain.data()["data"]} == {"rows", "seq_len", "seed", "val"}


# length_curriculum


def curriculum(**options: Any) -> Plan:
    given = {"length_curriculum." + key: value for key, value in options.items() if "." not in key}
    given |= {key: value for key, value in options.items() if "." in key}
    sizes = {"train.rows": 4, "train.seq_len": 16, "train.steps": 24}
    return build_plan(load("tiny", plugins="length_curriculum", settings=SMALL | sizes | given))


def documents_of(lengths: list[int]) -> Documents:
    rng = np.random.default_rng(0)
    return Documents.of([rng.integers(0, VOCAB, n) for n in lengths], VOCAB)


def sized(plan: Plan, documents: Documents, count: int, **more: Any) -> list[StepBatch]:
    given = {**plan.config.train.shapes[-1]._asdict(), "seed": 0, "by": plan.arrangement}
    with Loader(documents, **given, shape_at=plan.shape_at, **more) as loader:
        # a batch without labels is not a step, and the next batch has the same size
        labelled = (step for step in itertools.islice(loader, 100) if step.supervised)
        return list(itertools.islice(labelled, count))


@given(
    lengths,
    st.lists(st.integers(1, 4), min_size=1, max_size=40),
    st.integers(1, 20),
    st.integers(0, 1),
)
def test_a_row_is_a_piece_of_one_document_and_a_power_of_two_long(
    lengths: list[int], asked: list[int], buffer: int, least: int
) -> None:
    stream, packer = Stream([*lengths, 50]), LengthPacker(17, 1 << least, buffer)
    rows, starts = [], None
    for power in asked:
        packer.capacity = (1 << power) + 1
        rows.append(packer.row(stream.take))
        (piece,) = rows[-1]
        assert piece.tokens == 1 << power
        (document,) = (d for d in stream.taken if d.first <= piece.first < d.last)
        assert piece.last <= document.last
        # powers of two, and at most one longer rest; sorted
        sizes = [one.tokens for one in packer.pending]
        assert sizes == sorted(sizes)
        assert all(size & (size - 1) == 0 or size > 16 for size in sizes)
        assert min([*sizes, 1 << least]) >= 1 << least
        assert len(sizes) <= buffer + 5 + 16  # and what one halving and one document add
        starts = len(stream.taken)
    assert starts
    used_once(rows, stream, packer)


@given(lengths, st.lists(st.integers(2, 4), min_size=1, max_size=8))
@settings(deadline=None, max_examples=25)
def test_only_ends_shorter_than_the_least_are_cut_while_the_buffer_has_room(
    lengths: list[int], asked: list[int]
) -> None:
    stream, packer = Stream([*lengths, 50]), LengthPacker(17, 4, 600)
    rows = []
    for power in asked:
        packer.capacity = (1 << power) + 1
        rows.append(packer.row(stream.take))
    lost = used_once(rows, stream, packer)
    ends = [sum(piece.tokens % 4 for piece in some) for some in (stream.taken, packer.pending)]
    assert lost == ends[0] - ends[1]


def test_pieces_are_the_bits_of_a_length_the_longest_first_and_the_oldest_is_next() -> None:
    stream, packer = Stream([21, 5]), LengthPacker(17, 1, 100)
    packer.capacity = 2  # a row of one token
    assert packer.row(stream.take) == [Piece(20, 21)]
    assert packer.pending == [Piece(16, 20), Piece(0, 16)]
    packer.capacity = 5
    assert packer.row(stream.take) == [Piece(16, 20)]
    assert packer.row(stream.take) == [Piece(21, 25)]
    packer.capacity = 17
    assert packer.row(stream.take) == [Piece(0, 16)]


def test_a_full_buffer_halves_longer_pieces_and_cuts_the_shortest() -> None:
    packer = LengthPacker(17, 2, 1)
    packer.pending = [Piece(0, 16)]
    packer.capacity = 5
    stream = Stream([6])
    rows = [packer.row(stream.take)[0] for _ in range(4)]
    assert rows == [Piece(0, 4), Piece(4, 8), Piece(8, 12), Piece(12, 16)]
    assert not stream.taken
    rows = [packer.row(stream.take)[0] for _ in range(5)]
    assert rows == [Piece(n, n + 4) for n in range(0, 30, 6)]
    assert len(packer.pending) == 1  # of the ends of two tokens


def test_text_without_a_document_that_is_long_enough_ends_the_run_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(length_curriculum, "SEARCHED", 50)
    packer = LengthPacker(17, 2, 3)
    with pytest.raises(
        DataError, match="50 consecutive documents are shorter than the 16 tokens"
    ) as error:
        packer.row(Stream([7, 15]).take)
    assert "train.seq_len below 16" in str(error.value.fix)


def test_a_document_of_many_rows_waits_as_one_piece() -> None:
    packer = LengthPacker(17, 1, 4)
    stream = Stream([16 * 100_000 + 3])
    for place in range(5):
        assert packer.row(stream.take) == [Piece(16 * place, 16 * place + 16)]
    assert len(packer.pending) == 1


# the curriculum


@given(st.integers(1, 7), st.sampled_from([1.0, 2.0, 100.0]), st.integers(1, 8), st.integers(0, 9))
@settings(deadline=None, max_examples=40)
def test_lengths_grow_within_each_cycle_and_all_are_alike_over_it(
    count: int, growth: float, cycles: int, seed: int
) -> None:
    steps = 1200 * cycles
    given = {"lengths": count, "growth": growth, "cycles": cycles}
    found = [drawn(step, steps, seed, **given) for step in range(1, steps + 1)]
    assert {*found} == {*range(count)}
    for cycle in range(cycles):
        within = np.array(found[1200 * cycle : 1200 * (cycle + 1)])
        first, last = within[:300], within[-300:]
        for length in range(count):  # the odds of the first and the last quarter are mirrored
            share, mirrored = np.mean(first == length), np.mean(last == count - 1 - length)
            assert share == pytest.approx(mirrored, abs=0.04)
        if growth > 1 and count > 1:
            assert np.mean(first) < np.mean(last) - 0.1


def test_growth_2_begins_with_the_odds_of_the_paper() -> None:
    odds = Counter(
        drawn(step, 10**6, 0, lengths=3, growth=2.0, cycles=1) for step in range(1, 7001)
    )
    assert [round(odds[length] / 1000) for length in range(3)] == [4, 2, 1]


def test_a_step_has_one_length_and_always_as_many_tokens() -> None:
    plan = curriculum(cycles=2, least=2)
    assert {shape.seq_len for shape in plan.course} == {2, 4, 8, 16}
    assert {shape.tokens for shape in plan.course} == {64}
    assert plan.tokens_per_step == 64
    found = sized(plan, documents_of([30] * 40), 24)
    for number, step in enumerate(found, 1):
        shape = plan.shape_at(number)
        (batch,) = step.micro
        assert batch["ids"].shape == (shape.rows, shape.seq_len)
        assert step.real == step.padded == 64  # nothing is padded
        assert step.supervised == 64  # the last label of a row is the next token of the text
        assert (batch["documents"] == 0).all()  # one document a row
    counts = found[-1].cursor["packed"]["counts"]
    assert counts["room"] == counts["used"] == 24 * 64
    assert counts["cut"] == 0


@pytest.mark.slow
@given(lengths, st.integers(0, 2), st.integers(1, 9), st.sampled_from([1, 20, 1000]))
@settings(deadline=None, max_examples=12)
def test_a_resumed_run_has_the_same_rows_however_a_step_is_split(
    lengths: list[int], seed: int, at: int, buffer: int
) -> None:
    documents = documents_of([*lengths, 40])
    plan, split = (
        curriculum(
            **{"buffer": buffer, "data.seed": seed, "train.rows": 4 // n, "train.accumulate": n}
        )
        for n in (1, 2)
    )
    assert plan.hash == split.hash
    whole = sized(plan, documents, 10)
    cursor = json.loads(json.dumps(whole[at - 1].cursor))
    for other, of in (
        (sized(plan, documents, 10 - at, cursor=cursor, step=at), whole[at:]),
        (sized(split, documents, 10), whole),
    ):
        for one, two in zip(other, of, strict=True):
            assert one.cursor == two.cursor
            for name in ("ids", "labels"):
                mine, yours = (np.concatenate([b[name] for b in s.micro]) for s in (one, two))
                np.testing.assert_array_equal(mine, yours)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"least": 3}, "length_curriculum.least=3 is not a power of two up to 16"),
        ({"least": 32}, "length_curriculum.least=32 is not a power of two up to 16"),
        (
            {"train.stages": [{"until": 0.5, "rows": 1}]},
            "'length_curriculum' sizes batches, and train.stages does so too",
        ),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as refused:
        curriculum(**options)
    assert said in refused.value.what
    assert refused.value.fix


def test_rows_that_are_no_power_of_two_are_shorter_which_is_said() -> None:
    plan = curriculum(**{"train.seq_len": 25})
    assert max(shape.seq_len for shape in plan.course) == 16
    (note,) = plan.notes
    assert "the longest rows have 16 tokens, not train.seq_len=25" in note


# other packers, under rows that change length

STAGES = [
    {"until": 0.3, "seq_len": 3},
    {"until": 0.5, "seq_len": 16},
    {"until": 0.8, "rows": 2, "seq_len": 5},
]


@given(lengths, st.integers(1, 9), st.sampled_from(["best_fit", "eos_align"]))
@settings(deadline=None, max_examples=12)
def test_the_others_take_rows_of_any_length_and_resume(
    lengths: list[int], at: int, name: str
) -> None:
    sizes = {"train.rows": 1, "train.seq_len": 16, "train.stages": STAGES}
    plan = build_plan(load("tiny", plugins=name, settings=SMALL | sizes))
    documents = documents_of(lengths)
    whole = sized(plan, documents, 10)
    assume(len(whole) == 10)  # documents of one token may have no label at all
    resumed = sized(
        plan, documents, 10 - at, step=at, cursor=json.loads(json.dumps(whole[at - 1].cursor))
    )
    for one, two in zip(whole[at:], resumed, strict=True):
        assert one.cursor == two.cursor
        for name in ("ids", "labels", "documents"):
            np.testing.assert_array_equal(one.micro[0][name], two.micro[0][name])
    assert [step.micro[0]["ids"].shape[1] for step in whole] == [3] * 3 + [16] * 2 + [5] * 3 + [
        16
    ] * 2
    if name == "best_fit":
        assert whole[-1].cursor["packed"]["counts"]["cut"] == 0


@given(lengths, st.lists(st.integers(2, 20), min_size=1, max_size=30), st.integers(1, 9))
def test_best_fit_cuts_what_waited_for_a_longer_row(
    lengths: list[int], capacities: list[int], buffer: int
) -> None:
    stream, packer = Stream(lengths), BestFitPacker(20, buffer)
    rows = []
    for capacity in capacities:
        packer.capacity = capacity
        rows.append(packer.row(stream.take))
        assert 1 <= sum(piece.tokens for piece in rows[-1]) <= capacity
    assert used_once(rows, stream, packer) == 0
