"""Files to a corpus: split, cache, fingerprint, and everything that is refused on the way."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.data import (
    Corpus,
    Documents,
    Tokenizer,
    open_documents,
    tokenise,
    write_shard,
)
from minillm_core.data.split import split
from minillm_core.errors import DataError

Open = Callable[..., Corpus]


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(records: Sequence[str | Sequence[int]], name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        rows = [{"text" if isinstance(r, str) else "ids": r} for r in records]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        return path

    return write


def decoded(documents: Documents, tokenizer: Tokenizer | None) -> list[str]:
    assert tokenizer
    return [tokenizer.decode(documents[i], specials=True) for i in range(len(documents))]


def test_every_document_is_there_once_behind_its_end_of_text(
    corpus_of: Open, jsonl: Callable, texts: list[str]
) -> None:
    corpus = corpus_of([jsonl(texts)])
    train, val = (decoded(part, corpus.tokenizer) for part in (corpus.train, corpus.val))
    expected = ["<|endoftext|>" + text for text in texts]
    chosen = sorted(np.random.default_rng(0).permutation(40)[:2])
    assert val == [expected[i] for i in chosen]
    assert train == [text for i, text in enumerate(expected) if i not in chosen]
    assert "38 documents" in corpus.description
    assert "2 documents" in corpus.description


def test_the_held_out_part_does_not_train_the_tokenizer(
    corpus_of: Open, jsonl: Callable, texts: list[str]
) -> None:
    corpus = corpus_of([jsonl(texts)], val=0.3)
    held = set(np.random.default_rng(0).permutation(40)[:12].tolist())
    alone = Tokenizer.train((t for i, t in enumerate(texts) if i not in held), 300)
    assert corpus.tokenizer
    assert corpus.tokenizer.digest == alone.digest


def test_the_seed_chooses_and_repeats(corpus_of: Open, jsonl: Callable, texts: list[str]) -> None:
    path = jsonl(texts)
    one, again, other = (corpus_of([path], seed=seed, val=0.2) for seed in (0, 0, 1))
    assert one.fingerprint == again.fingerprint != other.fingerprint
    assert decoded(one.val, one.tokenizer) != decoded(other.val, other.tokenizer)


def test_few_documents_give_the_tail_of_the_stream(
    corpus_of: Open, tmp_path: Path, texts: list[str]
) -> None:
    whole = "\n".join(texts)
    (tmp_path / "a.txt").write_text(whole)
    corpus = corpus_of([tmp_path / "a.txt"], val=0.25)
    tokens = corpus.train.tokens + corpus.val.tokens
    assert corpus.val.tokens == round(0.25 * tokens)
    assert corpus.tokenizer
    ids = np.concatenate([corpus.train[0], corpus.val[0]])
    assert corpus.tokenizer.decode(ids) == whole


lengths = st.lists(st.integers(1, 12), min_size=1, max_size=40)


@given(lengths, st.floats(0, 0.99), st.integers(0, 2), st.integers(1, 6))
def test_a_split_loses_and_repeats_nothing(
    sizes: list[int], fraction: float, seed: int, seq_len: int
) -> None:
    ends = np.cumsum(sizes)
    documents = Documents.of(
        [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)], 1000
    )
    try:
        train, val = split(documents, fraction, seed, seq_len, "here")
    except DataError:
        assert len(sizes) >= 20 or documents.tokens * (1 - fraction) < 2 * (seq_len + 1)
        return
    parts = [np.concatenate([p[i] for i in range(len(p))]) for p in (train, val)]
    assert min(map(len, parts)) > seq_len
    assert sorted(np.concatenate(parts).tolist()) == list(range(documents.tokens))
    if len(sizes) < 20:
        assert np.concatenate(parts).tolist() == list(range(documents.tokens))
    assert len({train.digest, val.digest, documents.digest}) == 3


def test_a_path_is_held_out_whole(corpus_of: Open, jsonl: Callable, texts: list[str]) -> None:
    path, val = jsonl(texts[:30]), jsonl(texts[30:], "val.jsonl")
    corpus = corpus_of([path], val=str(val))
    assert (len(corpus.train), len(corpus.val)) == (30, 10)
    val.write_text(val.read_text().replace("30:", "31:"))
    assert corpus_of([path], val=str(val)).fingerprint != corpus.fingerprint


def test_a_second_start_reads_nothing_but_the_cache(
    corpus_of: Open, jsonl: Callable, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl([*texts, ""])
    first: list[str] = []
    corpus = corpus_of([path], say=first.append)
    monkeypatch.setattr(tokenise, "encode", lambda *a: pytest.fail("encoded again"))
    monkeypatch.setattr(tokenise, "survey", lambda *a: pytest.fail("read again"))
    second: list[str] = []
    again = corpus_of([path], say=second.append)
    assert again.fingerprint == corpus.fingerprint
    assert second == first
    assert "left out: 1 empty documents" in first
    moved = path.rename(path.with_name("moved.jsonl"))
    os.utime(moved, (1, 1))
    assert corpus_of([moved]).fingerprint == corpus.fingerprint


def entry(tmp_path: Path) -> Path:
    return next((tmp_path / "cache" / "tokens").iterdir())


@pytest.mark.parametrize("name", ["ids.bin", "spans.npy", "meta.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_cache_is_made_again_aloud(
    corpus_of: Open, jsonl: Callable, texts: list[str], tmp_path: Path, name: str, damage: str
) -> None:
    path = jsonl(texts)
    before = corpus_of([path])
    file = entry(tmp_path) / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.unlink()
    if damage != "remove":
        file.write_bytes(data if damage == "flip" else data[: len(data) // 2])
    said: list[str] = []
    assert corpus_of([path], say=said.append).fingerprint == before.fingerprint
    assert any("are damaged" in line for line in said)
    quiet: list[str] = []
    corpus_of([path], say=quiet.append)
    assert not any("are damaged" in line for line in quiet)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("sat", "sit", 1),
        lambda text: text + '{"text": "one more"}\n',
        lambda text: "".join(reversed(text.splitlines(keepends=True))),
    ],
)
def test_changed_data_have_another_fingerprint(
    corpus_of: Open, jsonl: Callable, texts: list[str], change: Callable[[str], str]
) -> None:
    path = jsonl(texts)
    before = corpus_of([path]).fingerprint
    path.write_text(change(path.read_text()))
    assert corpus_of([path]).fingerprint != before


def test_a_failed_start_leaves_nothing_in_the_cache(
    corpus_of: Open, jsonl: Callable, texts: list[str], tmp_path: Path
) -> None:
    Tokenizer.train(texts, 300).save(tmp_path / "t.json")
    path = jsonl(texts)
    path.write_text(path.read_text() + "not json\n")
    with pytest.raises(DataError, match="line 41"):
        corpus_of([path], tokenizer=str(tmp_path / "t.json"))
    assert not list((tmp_path / "cache" / "tokens").iterdir())


def test_what_dead_processes_left_is_swept_after_a_day(
    corpus_of: Open, jsonl: Callable, texts: list[str], tmp_path: Path
) -> None:
    tokens = tmp_path / "cache" / "tokens"
    for name, age in (("old.tmp-00", 48 * 3600), ("new.tmp-00", 60)):
        (tokens / name).mkdir(parents=True)
        then = time.time() - age
        os.utime(tokens / name, (then, then))
    corpus_of([jsonl(texts)])
    assert {folder.name for folder in tokens.glob("*.tmp-*")} == {"new.tmp-00"}


def test_a_given_tokenizer_is_used_and_unused_rows_are_said(
    corpus_of: Open, jsonl: Callable, texts: list[str], tmp_path: Path
) -> None:
    Tokenizer.train(texts, 270).save(tmp_path / "t.json")
    said: list[str] = []
    corpus = corpus_of([jsonl(texts)], tokenizer=str(tmp_path / "t.json"), say=said.append)
    assert corpus.tokenizer
    assert corpus.tokenizer.size == 270
    assert any("270 entries" in line and "30 rows" in line for line in said)


def test_ids_skip_the_tokenizer_and_get_their_end_of_text(corpus_of: Open, jsonl: Callable) -> None:
    lists = [[1, 2, 3, 4], [0, 5, 6, 7], [8] * 9, [299, 9, 9]]
    corpus = corpus_of([jsonl(lists)], seq_len=3, val=0.1)
    assert corpus.tokenizer is None
    whole = np.concatenate([p[i] for p in (corpus.train, corpus.val) for i in range(len(p))])
    assert whole.tolist() == [0, 1, 2, 3, 4, 0, 5, 6, 7, 0, *[8] * 9, 0, 299, 9, 9]


def test_shards_are_mapped_where_they_are(corpus_of: Open, tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", np.array([77, 1, 2, 3, 77, 4, 5, 6]), 300)
    write_shard(tmp_path / "b.bin", np.array([8, 9, 77, 10, 11, 12, 13, 14]), 300)
    said: list[str] = []
    corpus = corpus_of([tmp_path / "a.bin", tmp_path / "b.bin"], seq_len=2, say=said.append)
    assert [corpus.train[i].tolist() for i in range(len(corpus.train))] == [
        [77, 1, 2, 3], [77, 4, 5, 6], [8, 9], [77, 10, 11]
    ]  # fmt: skip
    assert corpus.val[0].tolist() == [12, 13, 14]
    assert any("begin with id 77" in line for line in said)
    assert (entry(tmp_path) / "ids.bin").stat().st_size == 0


def test_text_ids_and_shards_mix_under_a_named_tokenizer_only(
    corpus_of: Open, jsonl: Callable, texts: list[str], tmp_path: Path
) -> None:
    tokenizer = Tokenizer.train(texts, 300)
    tokenizer.save(tmp_path / "t.json")
    write_shard(tmp_path / "a.bin", np.array([0, 1, 2, 3]), 300)
    paths = [tmp_path / "a.bin", jsonl([*texts[:2], [5, 6]])]
    for mixed in (paths, paths[1:]):
        with pytest.raises(DataError, match="text and ids"):
            corpus_of(mixed)
    whole = open_documents(
        [str(path) for path in paths],
        tokenizer=tokenizer,
        vocab=300,
        cache=tmp_path / "cache",
        say=lambda line: None,
    )
    assert len(whole) == 4
    assert whole[2].tolist() == [0, 5, 6]
    assert whole[3].tolist() == [0, 1, 2, 3]
    with pytest.raises(DataError, match="there is no tokenizer") as raised:
        corpus_of([tmp_path / "a.bin"], seq_len=1, val=str(paths[1]))
    assert raised.value.where == str(paths[1])


@pytest.mark.parametrize("value", [300, 65_535])
def test_a_poisoned_shard_is_refused(corpus_of: Open, tmp_path: Path, value: int) -> None:
    ids = np.arange(200)
    ids[123] = value
    write_shard(tmp_path / "a.bin", ids, 65_536)
    with pytest.raises(DataError, match=f"id {value} is outside") as raised:
        corpus_of([tmp_path / "a.bin"])
    assert raised.value.where == f"{tmp_path / 'a.bin'}, token 123, byte {1024 + 246}"


@pytest.mark.parametrize("files", [[""], ["", ""], ["\ufeff"]])
def test_empty_data_are_refused(corpus_of: Open, tmp_path: Path, files: list[str]) -> None:
    for number, text in enumerate(files):
        (tmp_path / f"{number}.txt").write_text(text, "utf-8")
    with pytest.raises(DataError, match="the data are empty"):
        corpus_of(sorted(tmp_path.glob("*.txt")))


@pytest.mark.parametrize("count", [1, 30])
def test_a_row_longer_than_the_data_is_refused(
    corpus_of: Open, jsonl: Callable, texts: list[str], count: int
) -> None:
    with pytest.raises(
        DataError, match=r"train\.seq_len=100000 is longer than the data: [1-9]\d* tokens, of which"
    ):
        corpus_of([jsonl(texts[:count])], seq_len=100_000)


def test_a_held_out_path_too_short_is_refused(
    corpus_of: Open, jsonl: Callable, texts: list[str]
) -> None:
    val = jsonl(["x"], "val.jsonl")
    with pytest.raises(DataError, match="longer than the data") as raised:
        corpus_of([jsonl(texts)], val=str(val))
    assert raised.value.where == str(val)


@pytest.mark.parametrize("val", [-0.1, 1.0, float("nan")])
def test_what_is_no_fraction_is_refused(corpus_of: Open, jsonl: Callable, val: float) -> None:
    with pytest.raises(DataError, match="must be a fraction"):
        corpus_of([jsonl(["a"])], val=val)


def test_a_cache_that_cannot_be_written_is_refused(
    corpus_of: Open, jsonl: Callable, texts: list[str], tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(DataError, match="the cache cannot be written"):
        corpus_of([jsonl(texts)])


def test_another_process_may_be_faster(
    corpus_of: Open,
    jsonl: Callable,
    texts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, encode = jsonl(texts), tokenise.encode
    first = corpus_of([path])
    theirs = entry(tmp_path)
    shutil.move(theirs, tmp_path / "theirs")

    def slow(*arguments: Any) -> None:
        encode(*arguments)
        shutil.move(tmp_path / "theirs", theirs)

    monkeypatch.setattr(tokenise, "encode", slow)
    assert corpus_of([path]).fingerprint == first.fingerprint
    assert [folder.name for folder in theirs.parent.iterdir()] == [theirs.name]


def test_progress_comes_to_its_end(jsonl: Callable, texts: list[str], tmp_path: Path) -> None:
    seen: dict[str, tuple[int, int]] = {}
    path = jsonl(texts)
    open_documents(
        [str(path)],
        tokenizer=Tokenizer.train(texts, 300),
        vocab=300,
        cache=tmp_path / "cache",
        say=lambda line: None,
        progress=lambda what, done, total: seen.update({what: (done, total)}),
    )
    size = path.stat().st_size
    assert seen == {"tokenising": (size, size)}
