"""Tests of mixtures: proportional rows of each source over any stretch, resumed, and read by several ranks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core.config.schema import weighted_path
from minillm_core.data import Corpus, Documents, Loader, StepBatch, write_shard
from minillm_core.data.documents import digest
from minillm_core.data.stream import Batch, MixedRows, next_source, whole_shares
from minillm_core.errors import ConfigError, DataError
from minillm_core.nn.reference import Function
from minillm_core.plugins.sourcing import Packer, Piece

VOCAB = 10_000
weights = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)
seeds = st.integers(0, 3)
sources = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=2, max_size=3)


class Marked:
    """Rows with the number of their source and their position in it."""

    def __init__(self, source: int) -> None:
        self.source, self.at = source, 0

    def read(self, rows: int, seq_len: int) -> Batch:
        places = np.arange(self.at, self.at + rows)
        self.at += rows
        return {"ids": np.stack([np.full(rows, self.source), places], axis=1)}

    def cursor(self) -> dict[str, Any]:
        return {}


@given(weights, st.lists(st.integers(1, 17), min_size=1, max_size=8))
@settings(deadline=None, max_examples=50)
def test_after_any_row_each_source_is_within_a_row_of_its_share(
    weights: list[float], reads: list[int]
) -> None:
    mixed = MixedRows([Marked(number) for number in range(len(weights))], weights, "")
    ids = np.concatenate([mixed.read(rows, 1)["ids"] for rows in reads])
    shares = np.array(weights) / sum(weights)
    given = np.cumsum(ids[:, :1] == np.arange(len(weights)), axis=0)
    due = np.arange(1, len(ids) + 1)[:, None] * shares
    assert np.abs(given - due).max() < 1 + 1e-9
    for number in range(len(weights)):  # and each is read in its own order
        np.testing.assert_array_equal(ids[ids[:, 0] == number, 1], np.arange(given[-1, number]))


@given(weights)
def test_whole_shares_are_exactly_the_weights(weights: list[float]) -> None:
    shares = whole_shares(weights)
    exact = [Fraction(weight) for weight in weights]
    assert all(type(share) is int and share > 0 for share in shares)
    assert [Fraction(share, sum(shares)) for share in shares] == [w / sum(exact) for w in exact]


@given(weights, st.integers(1, 60))
def test_a_turn_is_that_of_the_rule_in_fractions(weights: list[float], count: int) -> None:
    shares, used = whole_shares(weights), [0] * len(weights)
    rates = [Fraction(share, sum(shares)) for share in shares]
    for total in range(count):
        behind = [n for n, rate in enumerate(rates) if used[n] <= rate * total]
        expected = min(behind, key=lambda n: ((used[n] + 1) / rates[n], n))
        assert next_source(shares, used, [1] * len(weights)) == expected
        used[expected] += 1


class Whole(Packer):
    """A packer with rows of single documents, which it cuts."""

    def row(self, take: Callable[[], Piece]) -> list[Piece]:
        document = self.pending.pop() if self.pending else take()
        if document.tokens > self.capacity:
            self.pending = [document.part(self.capacity, document.tokens)]
        return [document.part(0, self.capacity)]


PACKED = {"packer": Function("mine", f"{__name__}:Whole", (("capacity", 7),))}


def parts_of(lengths: Sequence[Sequence[int]]) -> tuple[Documents, list[Documents]]:
    """Return all documents, with distinct ids, and those of each source."""
    every = [n for source in lengths for n in source]
    ends = np.cumsum(every)
    ids = [range(end - n, end) for n, end in zip(every, ends, strict=True)]
    whole, first, parts = Documents.of(ids, VOCAB), 0, []
    for number, source in enumerate(lengths):
        parts.append(whole.part(str(number), whole.spans[first : first + len(source)]))
        first += len(source)
    return whole, parts


def steps(
    whole: Documents, parts: Sequence[tuple[float, Documents]], count: int, **more: Any
) -> list[StepBatch]:
    given = {"rows": 1, "accumulate": 1, "seq_len": 6, "seed": 0} | more
    with Loader(whole, parts=parts, **given) as loader:
        return list(itertools.islice(loader, count))


def rows(found: Sequence[StepBatch], name: str = "ids") -> np.ndarray:
    return np.concatenate([batch[name] for step in found for batch in step.micro])


@pytest.mark.slow
@pytest.mark.parametrize("by", [{}, PACKED], ids=["end to end", "packer"])
@given(lengths=sources, seed=seeds, rows_=st.integers(1, 3), accumulate=st.integers(1, 2))
@settings(deadline=None, max_examples=40)
def test_a_mixture_is_the_rows_of_its_sources_for_any_split_ranks_and_resume(
    by: Any, lengths: list[list[int]], seed: int, rows_: int, accumulate: int
) -> None:
    whole, parts = parts_of(lengths)
    mixed = [(number + 1.0, part) for number, part in enumerate(parts)]
    size = {"seed": seed, "by": by}
    one = steps(whole, mixed, 24 * rows_ * accumulate, **size)
    stream = {name: rows(one, name) for name in one[0].micro[0]}

    of_parts = [rows(steps(part, (), len(one), **size)) for part in parts]
    bounds = np.cumsum([part.tokens for part in parts])
    source = np.searchsorted(bounds, stream["ids"][:, 0], side="right")
    for number, alone in enumerate(of_parts):
        np.testing.assert_array_equal(
            stream["ids"][source == number], alone[: int((source == number).sum())]
        )

    split = size | {"rows": rows_, "accumulate": accumulate}
    several = steps(whole, mixed, 24, **split)
    for name, expected in stream.items():
        np.testing.assert_array_equal(rows(several, name), expected)
    assert several[-1].cursor == one[-1].cursor

    for ranks in (2, 4):  # together they read the same rows, and continue from each other's cursor
        count, sizes = 24 // ranks, split | {"rows": rows_ * ranks}
        each = [steps(whole, mixed, count, ranks=ranks, rank=r, **sizes) for r in range(ranks)]
        of_rows = accumulate % ranks > 0  # otherwise each has some of the micro-batches
        for name, expected in stream.items():
            together: list[np.ndarray] = []
            for several_ in zip(*each, strict=True):  # the step of every rank
                micro = [[one[name] for one in step.micro] for step in several_]
                turns = zip(*micro, strict=True) if of_rows else micro
                together += [array for turn in turns for array in turn]
            np.testing.assert_array_equal(np.concatenate(together), expected)
        assert all(found[-1].cursor == one[-1].cursor for found in each)
        assert len({found[-1].supervised for found in each}) == 1

    for place in (0, 7, 22):
        cursor = json.loads(json.dumps(several[place].cursor))
        resumed = steps(whole, mixed, 23 - place, cursor=cursor, **split)
        np.testing.assert_array_equal(rows(resumed), rows(several[place + 1 :]))
        assert resumed[-1].cursor == several[-1].cursor


def test_another_seed_is_another_order_and_an_epoch_of_a_source_is_a_permutation() -> None:
    whole, parts = parts_of([[5] * 12, [7] * 9])
    mixed = [(60.0, parts[0]), (63.0, parts[1])]  # an epoch of both ends at the same row
    found = [rows(steps(whole, mixed, 123, seq_len=1, seed=seed))[:, 0] for seed in (0, 1)]
    for ids in found:
        assert sorted(ids.tolist()) == list(range(123))
    assert (found[0] != found[1]).any()


def test_a_cursor_of_another_mixture_is_refused() -> None:
    whole, parts = parts_of([[20], [30]])
    cursor = steps(whole, [(1.0, parts[0]), (1.0, parts[1])], 3)[-1].cursor
    other, others = parts_of([[20], [31]])
    with pytest.raises(DataError, match="differ from those that the run was reading"):
        steps(other, [(1.0, others[0]), (1.0, others[1])], 1, cursor=cursor)


# from paths


@pytest.fixture
def mixed_files(tmp_path: Path, texts: list[str]) -> list[str]:
    """Create a JSON lines file, a folder of two texts, and a shard."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts[:25]))
    (tmp_path / "b").mkdir()
    for number in (0, 1):
        (tmp_path / "b" / f"{number}.txt").write_text(texts[25 + number] * 3)
    return [str(tmp_path / name) for name in ("a.jsonl", "b")]


def test_each_path_is_a_source_and_is_held_out_by_itself(
    corpus_of: Callable[..., Corpus], mixed_files: list[str], texts: list[str]
) -> None:
    paths = [
        Path(f"{path}:{weight}") for path, weight in zip(mixed_files, ("3", "0.5"), strict=True)
    ]
    corpus = corpus_of(paths, val=0.2)
    plain = corpus_of([Path(path) for path in mixed_files], val=0.2)
    assert corpus.tokenizer is not None
    assert plain.tokenizer is not None
    assert corpus.tokenizer.digest == plain.tokenizer.digest
    assert not plain.parts
    assert [(one.name, one.weight) for one in corpus.parts] == [
        (mixed_files[0], 3.0),
        (mixed_files[1], 0.5),
    ]
    for one, lines in zip(corpus.parts, (texts[:25], [t * 3 for t in texts[25:27]]), strict=True):
        assert one.val is not None
        found = [
            corpus.tokenizer.decode(part[i])
            for part in (one.train, one.val)
            for i in range(len(part))
        ]
        assert sorted("".join(found)) == sorted("".join(lines))
    assert corpus.train.tokens == sum(one.train.tokens for one in corpus.parts)
    assert corpus.val.tokens == sum(one.val.tokens for one in corpus.parts if one.val)


def test_the_fingerprint_knows_the_weights_and_not_the_names(
    corpus_of: Callable[..., Corpus], mixed_files: list[str], tmp_path: Path
) -> None:
    a, b = mixed_files
    one = corpus_of([Path(f"{a}:1"), Path(f"{b}:3")]).fingerprint
    assert corpus_of([Path(f"{a}:0.25"), Path(f"{b}:0.75")]).fingerprint == one
    assert corpus_of([Path(f"{a}:1"), Path(f"{b}:2")]).fingerprint != one
    assert corpus_of([Path(a), Path(b)]).fingerprint != one
    Path(a).rename(tmp_path / "c.jsonl")
    assert corpus_of([tmp_path / "c.jsonl:1", Path(f"{b}:3")]).fingerprint == one


def test_files_that_are_read_and_shards_are_told_apart(
    corpus_of: Callable[..., Corpus], tmp_path: Path
) -> None:
    def ids(first: int) -> np.ndarray:
        return np.array([0, *range(first, first + 40), 0, *range(first, first + 30)])

    for name, first in (("x", 100), ("z", 200)):
        (tmp_path / name).mkdir()
        write_shard(tmp_path / name / "s.bin", ids(first), 300)
    (tmp_path / "y.jsonl").write_text(json.dumps({"ids": [*range(50, 90)]}) + "\n")
    paths = [tmp_path / "x:1", tmp_path / "y.jsonl:1", tmp_path / "z:1"]
    corpus = corpus_of(paths, val=0.2)
    ranges = [(100, 140), (50, 90), (200, 240)]
    for part, (first, last) in zip(corpus.parts, ranges, strict=True):
        for i in range(len(part.train)):
            found = [one for one in part.train[i].tolist() if one]
            assert found
            assert first <= min(found)
            assert max(found) < last


def test_a_source_without_enough_text_is_named(
    corpus_of: Callable[..., Corpus], mixed_files: list[str], tmp_path: Path
) -> None:
    (tmp_path / "small.txt").write_text("few")
    with pytest.raises(DataError) as refused:
        corpus_of([Path(f"{mixed_files[0]}:1"), tmp_path / "small.txt:1"])
    assert "longer than the data" in refused.value.what
    assert refused.value.where == str(tmp_path / "small.txt")


def test_a_held_out_path_serves_all_sources(
    corpus_of: Callable[..., Corpus], mixed_files: list[str], tmp_path: Path, texts: list[str]
) -> None:
    (tmp_path / "val.txt").write_text(texts[30] * 4)
    paths = [Path(f"{path}:1") for path in mixed_files]
    corpus = corpus_of(paths, val=str(tmp_path / "val.txt"))
    assert [one.val for one in corpus.parts] == [None, None]
    assert corpus.tokenizer is not None
    assert corpus.tokenizer.decode(corpus.val[0]) == texts[30] * 4
    assert corpus.train.digest != digest("")
    (tmp_path / "other.txt").write_text(texts[29] * 4)
    other = corpus_of(paths, val=str(tmp_path / "other.txt"))
    assert other.fingerprint != corpus.fingerprint  # a resumed run compares its losses


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.jsonl", ("a.jsonl", None)),
        ("a.jsonl:0.7", ("a.jsonl", 0.7)),
        ("a:1:0.5", ("a:1", 0.5)),
        ("a:b", ("a:b", None)),
        ("a:", ("a:", None)),
        ("a:nan", ("a:nan", None)),
        ("a:.5e1", ("a", 5.0)),
    ],
)
def test_a_number_behind_the_last_colon_is_a_weight(
    text: str, expected: tuple[str, float | None]
) -> None:
    assert weighted_path(text) == expected


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["a:0"], "the weight 0 is not above 0"),
        (["a:1", "b:-2"], "the weight -2 is not above 0"),
        (["a:1", "b"], "a path has no weight"),
        (["a:1", "a:2"], "a path with a weight is given twice"),
    ],
)
def test_weights_that_mean_nothing_are_refused(paths: list[str], message: str) -> None:
    import minillm_core as minillm

    with pytest.raises(ConfigError) as refused:
        minillm.load("tiny", settings={"data.paths": paths})
    assert message in str(refused.value)
    assert "data.paths" in str(refused.value)
