"""Tests of plugins' sources: documents with fields, encoded, cached, split, packed and resumed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core import (
    DataError,
    Packer,
    PlanError,
    Plugin,
    PluginCodeError,
    build_plan,
    load,
    option,
)
from minillm_core.data import Documents, Loader, ValidationBatches, open_corpus, open_documents
from minillm_core.data.corpus import Corpus
from minillm_core.data.documents import digest
from minillm_core.documents import Segment, Special, Tokenizer
from minillm_core.plugins.manager import LoadedPlugin

TURNS = [
    {"user": f"What is {n} + 1?", "assistant": f"It is {n + 1}, of course."} for n in range(40)
]
CALLS: list[str] = []


def turns(files: Any, reading: Any, *, system: bool = False) -> Iterator[list[Segment]]:
    """Yield a question and its answer per line; the answer is trained on."""
    CALLS.append("turns")
    for file in files:
        for _, _, one in file.format.records(file.path, file.packing, reading):
            yield [
                *([Segment("Be short.", {"role": 3})] if system else []),
                Segment(one["user"], {"role": 1}),
                Segment(Special("answer"), {"role": 1}),
                Segment(one["assistant"], {"role": 2, "weights": 1.0}),
                Segment(Special("end_of_turn"), {"role": 2, "weights": 0.5}),
            ]


def counted(files: Any, reading: Any, *, documents: int) -> Iterator[Any]:
    for n in range(documents):
        ids = np.arange(n + 2) % 50
        yield [Segment(ids, {"place": np.arange(n + 2)})]


def bad(files: Any, reading: Any, *, what: int) -> Iterator[Any]:
    yield [
        17,
        ["text"],
        [Segment("a", {"other": 1})],
        [Segment([1, 10_000])],
        [Segment("abc", {"role": np.ones(3)})],
        [Segment("a", {"role": 1.5})],
        [Segment("a", {"weights": -1.0})],
        [Segment("a", {"weights": float("nan")})],
        [Segment(Special("nobody"))],
        "\ud800",
        np.ones((2, 2), int),
    ][what]


class Turns(Plugin, api=1):
    """Chats."""

    system: bool = option(False, help="a system turn first")

    def build_data(self, data: Any) -> None:
        fields = {"role": "int32", "weights": "float32"}
        data.source(turns, fields=fields, system=self.system)
        data.special("answer")
        data.special("end_of_turn", "<|eot|>")


class Counted(Plugin, api=1):
    """Ids without files."""

    def build_data(self, data: Any) -> None:
        data.source(counted, fields={"place": "int32"}, files=False, documents=30)


class Given(Plugin, api=1):
    """A call of build_data that is given."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        object.__setattr__(self, "_given", given)

    def build_data(self, data: Any) -> None:
        given = dict(self._given)  # type: ignore[attr-defined]
        for slot, (arguments, named) in given.items():
            getattr(data, slot)(*arguments, **named)


def planned(plugin: Plugin, *others: Plugin) -> Any:
    config = load("tiny", settings={"train.steps": 10, "train.seq_len": 16}).config
    loaded = [LoadedPlugin.of(f"p{n}", one) for n, one in enumerate((plugin, *others))]
    return build_plan(config, loaded)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in TURNS))
    return path


def opened(plan: Any, tmp_path: Path, *paths: Path | str, vocab: int = 400, **data: Any) -> Corpus:
    given = {"paths": [str(path) for path in paths], "val": 0.1, **data}
    config = plan.config.data.model_copy(update=given)
    said: list[str] = []
    return open_corpus(
        config, vocab, 16, cache=tmp_path / "c", say=said.append, asked=plan.sourcing
    )


def test_a_document_is_its_segments_encoded_one_by_one(tmp_path: Path, chats: Path) -> None:
    corpus = opened(planned(Turns()), tmp_path, chats)
    tokenizer, specials = corpus.tokenizer, corpus.specials
    assert tokenizer is not None
    assert specials == {"end_of_text": 0, "answer": 1, "end_of_turn": 2}
    assert tokenizer.decode([1, 2], specials=True) == "<|answer|><|eot|>"
    assert not {1, 2} & {*tokenizer.encode(["<|answer|> and <|eot|>"])[0].tolist()}
    wanted = set()
    for one in TURNS:
        asked, answered = tokenizer.encode([one["user"], one["assistant"]])
        ids = (0, *asked.tolist(), 1, *answered.tolist(), 2)
        role = (0, *(1 for _ in asked), 1, *(2 for _ in answered), 2)
        wanted.add((ids, role, (0.0,) * (2 + len(asked)) + (1.0,) * len(answered) + (0.5,)))
    found = set()
    for part in (corpus.train, corpus.val):
        for array, first, last in part.spans.tolist():
            record = part.arrays[array][first:last]
            found.add(tuple(tuple(record[name].tolist()) for name in ("ids", "role", "weights")))
    assert found == wanted


def test_targets_are_of_the_token_that_is_predicted(tmp_path: Path, chats: Path) -> None:
    corpus = opened(planned(Turns()), tmp_path, chats)
    with Loader(corpus.train, rows=2, accumulate=1, seq_len=16, seed=0) as loader:
        steps = list(itertools.islice(loader, 60))
        rest = list(itertools.islice(loader, 5))
    flat = {n: np.concatenate([s.micro[0][n].ravel() for s in steps]) for n in steps[0].micro[0]}
    np.testing.assert_array_equal(flat["target_role"][:-1], flat["role"][1:])  # including row ends
    trained = flat["labels"] >= 0
    np.testing.assert_array_equal(trained, flat["target_role"] == 2)
    np.testing.assert_array_equal(flat["labels"][:-1][trained[:-1]], flat["ids"][1:][trained[:-1]])
    ends = flat["labels"] == corpus.specials["end_of_turn"]
    np.testing.assert_array_equal(flat["weights"], np.where(ends, 0.5, trained))
    assert steps[0].supervised == int((steps[0].micro[0]["labels"] >= 0).sum())
    cursor = steps[-1].cursor
    with Loader(corpus.train, rows=2, accumulate=1, seq_len=16, seed=0, cursor=cursor) as resumed:
        for one, two in zip(rest, resumed, strict=False):
            for name, array in one.micro[0].items():
                np.testing.assert_array_equal(array, two.micro[0][name])
    batches = ValidationBatches(corpus.val, rows=2, seq_len=16, tokens=None, seed=None)
    for batch in batches:
        assert "weights" not in batch
        np.testing.assert_array_equal(batch["labels"] >= 0, batch["target_role"] == 2)


class Cutting(Packer):
    """A packer with a short and a long piece of alternate documents, from their second token on."""

    def row(self, take: Any) -> Any:
        return [take().part(1, 4), take().part(0, 6)]


@given(st.lists(st.integers(7, 20), min_size=2, max_size=6), st.integers(0, 3))
@settings(deadline=None, max_examples=40)
def test_a_packer_carries_fields_and_cuts_them_where_it_cuts_labels(
    lengths: list[int], seed: int
) -> None:
    plan = planned(Given(packer=((Cutting,), {})))
    ids = np.arange(sum(lengths), dtype=np.int32)
    records = np.zeros(len(ids), [("ids", "<i4"), ("role", "<i4"), ("weights", "<f4")])
    records["ids"], records["role"], records["weights"] = ids, ids * 2 + 1, ids % 3
    ends = np.cumsum(lengths)
    spans = np.stack([0 * ends, ends - lengths, ends], axis=1)
    documents = Documents((records,), spans, 200, digest(spans))
    given = {"rows": 2, "accumulate": 1, "seq_len": 16, "seed": seed, "by": plan.arrangement}
    with Loader(documents, **given) as loader:
        for step in itertools.islice(loader, 4):
            batch = step.micro[0]
            real = batch["documents"] >= 0
            np.testing.assert_array_equal(batch["role"], np.where(real, batch["ids"] * 2 + 1, 0))
            known = batch["labels"] >= 0
            np.testing.assert_array_equal(
                batch["target_role"][known], batch["labels"][known] * 2 + 1
            )
            np.testing.assert_array_equal(batch["weights"][known], batch["labels"][known] % 3)
            assert (batch["labels"][known] % 3 != 0).all()
            jump = batch["documents"][:, :-1] != batch["documents"][:, 1:]
            assert not (batch["target_role"][:, :-1][jump] != 0).any() or real.all()


def test_what_is_kept_is_read_again_and_known_by_its_makers(tmp_path: Path, chats: Path) -> None:
    plan = planned(Turns())
    first = opened(plan, tmp_path, chats)
    CALLS.clear()
    again = opened(plan, tmp_path, chats)
    assert not CALLS
    assert again.fingerprint == first.fingerprint
    other = planned(Turns(system=True))
    assert opened(other, tmp_path, chats).fingerprint != first.fingerprint
    assert CALLS
    assert other.hash != plan.hash
    tokens = next(tmp_path.glob("c/tokens/*/ids.bin"))
    for damaged in tmp_path.glob("c/tokens/*/ids.bin"):
        data = bytearray(damaged.read_bytes())
        data[7] ^= 1  # of a field
        damaged.write_bytes(data)
    assert tokens.exists()
    assert opened(plan, tmp_path, chats).fingerprint == first.fingerprint


def test_held_out_files_and_evaluations_come_from_the_source(tmp_path: Path, chats: Path) -> None:
    plan = planned(Turns())
    corpus = opened(plan, tmp_path, chats, val=str(chats))
    assert corpus.val.fields.keys() == {"ids", "role", "weights"}
    documents = open_documents(
        [str(chats)],
        tokenizer=corpus.tokenizer,
        vocab=400,
        cache=tmp_path / "c",
        say=lambda line: None,
        asked=plan.sourcing,
    )
    assert sorted(map(tuple, (documents[n].tolist() for n in range(40)))) == sorted(
        map(tuple, (corpus.val[n].tolist() for n in range(40)))
    )


def test_a_source_may_have_no_files(tmp_path: Path) -> None:
    plan = planned(Counted())
    corpus = opened(plan, tmp_path)
    assert "p0" in corpus.description
    assert corpus.tokenizer is None
    batch = next(iter(Loader(corpus.train, rows=4, accumulate=1, seq_len=16, seed=0))).micro[0]
    begins = batch["place"] == 0
    assert (batch["ids"][~begins] == batch["place"][~begins] % 50).all()
    with pytest.raises(DataError, match="plugin 'p0', which reads no files"):
        opened(plan, tmp_path, tmp_path)
    with pytest.raises(DataError, match="plugin 'p0', which reads no files"):
        opened(plan, tmp_path, val="held.txt")


@pytest.mark.parametrize("what", range(11))
def test_what_is_no_document_is_the_plugins_fault(tmp_path: Path, chats: Path, what: int) -> None:
    fields = {"role": "int32", "weights": "float32"}
    plan = planned(Given(source=((bad,), {"fields": fields, "what": what})))
    with pytest.raises(PluginCodeError, match="'p0' broke the documents in bad"):
        opened(plan, tmp_path, chats)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"source": ((turns,), {"fields": {"role": "int8"}})}, "int32, float32"),
        ({"source": ((turns,), {"fields": {"ids": "int32"}})}, "reserved name"),
        ({"source": ((turns,), {"fields": {"weights": "int32"}})}, "float32"),
        ({"source": ((lambda files, reading: [],), {})}, "cannot be referred to"),
        ({"special": (("two words",), {})}, "cannot be asked for"),
        ({"special": (("end_of_text",), {})}, "cannot be asked for"),
        ({"special": (("",), {})}, "cannot be asked for"),
    ],
)
def test_what_cannot_be_declared_is_refused_while_planning(given: Any, said: str) -> None:
    with pytest.raises(PlanError) as refused:
        planned(Given(**given))
    assert said in str(refused.value)


def test_two_sources_or_two_tokens_of_one_name_are_refused() -> None:
    with pytest.raises(PlanError, match=r"data\.source is claimed by both 'p0' and 'p1'"):
        planned(Counted(), Turns())
    with pytest.raises(PlanError, match="answer"):
        planned(Turns(), Given(special=(("answer",), {})))


def test_a_tokenizer_that_is_given_is_asked_for_its_tokens(tmp_path: Path, chats: Path) -> None:
    asked = planned(Given(special=(("middle",), {}))).sourcing.specials
    kept = Tokenizer.train(["some text"] * 9, 300, specials=asked)
    path = tmp_path / "tokenizer.json"
    kept.save(path)
    text = tmp_path / "a.txt"
    text.write_text("one two three <|middle|> four " * 99)
    plan = planned(Given(special=(("here", "<|middle|>"), {})))
    corpus = opened(plan, tmp_path, text, tokenizer=str(path))
    assert corpus.specials == {"end_of_text": 0, "here": 1}
    assert not (corpus.train[0] == 1).any()
    lacking = planned(Given(special=(("absent",), {})))
    with pytest.raises(DataError, match=r"no special token <\|absent\|> for plugin 'p0'"):
        opened(lacking, tmp_path, text, tokenizer=str(path))
    adding = planned(Given(special=(("absent",), {"add": True})))
    added = opened(adding, tmp_path, text, tokenizer=str(path))
    assert added.specials["absent"] == kept.size
    assert added.tokenizer is not None
    assert not (added.tokenizer.encode(["<|absent|>"])[0] == kept.size).any()
    with pytest.raises(DataError, match=r"it has .* ids in .* rows") as full:
        opened(adding, tmp_path, text, tokenizer=str(path), vocab=kept.size)
    assert "without data.tokenizer, --branch and --init" in str(full.value.fix)
    ids = tmp_path / "ids.jsonl"
    ids.write_text('{"ids": [1, 2, 3]}\n' * 99)
    with pytest.raises(DataError, match="there is no tokenizer"):
        opened(lacking, tmp_path, ids)


def test_a_source_is_called_once_for_each_path_of_a_mixture(tmp_path: Path, chats: Path) -> None:
    other = tmp_path / "more.jsonl"
    other.write_text("".join(json.dumps({**one, "user": "Why?"}) + "\n" for one in TURNS))
    plan = planned(Turns())
    corpus = opened(plan, tmp_path, f"{chats}:2", f"{other}:1")
    assert [(one.name, len(one.train)) for one in corpus.parts] == [
        (str(chats), 36),
        (str(other), 36),
    ]
    assert corpus.train.fields.keys() == {"ids", "role", "weights"}
    assert CALLS[-2:] == ["turns", "turns"]


def test_a_model_of_synthetic_documents_is_evaluated_on_files(tmp_path: Path) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text('{"ids": [1, 2, 3]}\n' * 3)
    given = {"tokenizer": None, "vocab": 400, "cache": tmp_path / "c", "say": print}
    documents = open_documents([str(path)], **given, asked=planned(Counted()).sourcing)
    assert [documents[n].tolist() for n in range(3)] == [[0, 1, 2, 3]] * 3


def test_pieces_of_a_long_text_are_one_document(tmp_path: Path) -> None:
    long = tmp_path / "long.txt"
    long.write_text("some words in a line\n" * 80_000)  # longer than a piece
    plan = planned(Given(source=((apart,), {"fields": {"role": "int32"}})))
    documents = open_documents(
        [str(long)],
        tokenizer=Tokenizer.train(["some words in a line\n"] * 9, 290),
        vocab=400,
        cache=tmp_path / "c",
        say=print,
        asked=plan.sourcing,
    )
    assert len(documents) == 1
    assert (documents.arrays[0]["role"][1:] == 4).all()


def apart(files: Any, reading: Any) -> Iterator[Any]:
    for file in files:
        for document in file.format.read(file.path, file.packing, reading):
            yield [Segment(document, {"role": 4})]


def test_who_lays_out_tokens_comes_before_who_reads_them() -> None:
    class Moves(Batches, api=1):
        """Moves."""

        def build_data(self, data: Any) -> None:
            data.rewrites()

    class Reads(Batches, api=1):
        """Reads."""

    assert planned(Reads(), Moves()).on_batch == ("p1", "p0")
    assert planned(Moves(), Reads()).on_batch == ("p0", "p1")


class Batches(Plugin, api=1):
    """Has an on_batch."""

    def on_batch(self, batch: Any) -> Any:
        return batch
