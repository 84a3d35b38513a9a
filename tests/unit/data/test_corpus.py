"""Tests of building a corpus from files: split, cache, fingerprint, and every refusal."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.config.schema import DataConfig
from minillm_core.data import (
    Corpus,
    Documents,
    Loader,
    Tokenizer,
    open_corpus,
    open_documents,
    store,
    tokenise,
    write_shard,
)
from minillm_core.data.corpus import split
from minillm_core.data.documents import digest
from minillm_core.data.sources import Source
from minillm_core.data.store import CacheWriter
from minillm_core.data.tokenise import TokenCache
from minillm_core.errors import DataError
from minillm_data.cache import clear_cache, list_cache

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


def test_the_tokenizer_does_not_depend_on_the_split(
    corpus_of: Open, jsonl: Callable, texts: list[str], tmp_path: Path
) -> None:
    path = jsonl(texts)
    splits = [{}, {"val": 0.3}, {"seed": 5}, {"val": str(jsonl(["a text held out"], "val.jsonl"))}]
    found = [corpus_of([path], **split) for split in splits]
    alone = Tokenizer.train(texts, 300)
    assert {corpus.tokenizer.digest for corpus in found if corpus.tokenizer} == {alone.digest}
    entries = list((tmp_path / "cache" / "tokens").iterdir())
    assert len(entries) == 2  # one of them is val.jsonl's
    whole = [np.concatenate([p[i] for p in (c.train, c.val) for i in range(len(p))]) for c in found]
    assert [np.sort(ids).tolist() for ids in whole[:3]] == [np.sort(whole[0]).tolist()] * 3


def test_a_large_text_gives_a_tokenizer_of_a_sample_aloud(
    corpus_of: Open, jsonl: Callable, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(texts)
    monkeypatch.setattr(tokenise, "SAMPLE", 1500)
    monkeypatch.setattr(tokenise, "_RUN", 1)
    said: list[str] = []
    one, again = (corpus_of([path], say=said.append, seed=seed) for seed in (0, 1))
    assert one.tokenizer
    assert again.tokenizer
    assert one.tokenizer.digest == again.tokenizer.digest
    assert said[: len(said) // 2] == said[len(said) // 2 :]
    assert "trained on a sample of 0.0 MB of the 0.0 MB of this text" in said[0]


@given(st.lists(st.integers(1, 400), max_size=60), st.integers(1, 300), st.integers(400, 3000))
def test_a_sample_is_whole_documents_in_order_and_full(
    sizes: list[int], run: int, limit: int
) -> None:
    documents = [f"{number}:" + "x" * size for number, size in enumerate(sizes)]
    before = tokenise.SAMPLE, tokenise._RUN
    tokenise.SAMPLE, tokenise._RUN = limit, run
    try:
        sample = tokenise.Sample()
        for document in documents:
            sample.add(document)
        sample.draw()
    finally:
        tokenise.SAMPLE, tokenise._RUN = before
    drawn = list(sample.texts())
    assert drawn == [document for document in documents if document in drawn]
    assert sample.total == sum(len(document) + 4 for document in documents)
    assert sample.drawn == sum(len(document) + 4 for document in drawn)
    if sample.total <= limit:
        assert drawn == documents
    elif run + 406 < limit:  # at most the length of a run with its missing part
        assert limit >= sample.drawn >= limit - run - 406


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
    assert corpus.description.endswith(f"; its end ({corpus.val.tokens} tokens) held out")
    (tmp_path / "b.txt").write_text(whole)
    both = corpus_of([tmp_path / "a.txt", tmp_path / "b.txt"], val=0.25)
    assert both.description.endswith(f"; their end ({both.val.tokens} tokens) held out")
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


def test_text_that_is_given_twice_or_both_trained_on_and_held_out_is_said(
    corpus_of: Open, jsonl: Callable, texts: list[str], tmp_path: Path
) -> None:
    path, other = jsonl(texts), jsonl(texts, "other.jsonl")
    (tmp_path / "link.jsonl").symlink_to(path)
    said: list[str] = []
    corpus_of([path, other], say=said.append)
    corpus_of([path], val=str(jsonl(texts[1:], "less.jsonl")), say=said.append)
    assert not [line for line in said if "jsonl" in line and "tokenizer" not in line]
    corpus_of([path, link := tmp_path / "link.jsonl"], say=said.append)
    assert [line for line in said if line.startswith(f"{path} is given twice: its documents count")]
    for val in (path, link, other):  # other: a copy
        said.clear()
        corpus_of([path], val=str(val), say=said.append)
        expected = f"{val} is both training and held-out text: the held-out loss says nothing"
        assert [line for line in said if line.startswith(expected)]


def test_the_library_that_encodes_is_a_detail(
    corpus_of: Open, jsonl: Callable, texts: list[str]
) -> None:
    said: list[str] = []
    details: list[str] = []
    corpus = corpus_of([jsonl(texts)], say=said.append, detail=details.append)
    assert corpus.tokenizer
    assert details[0] == f"tokenising with {corpus.tokenizer.encoder}"
    assert details[0] not in said


def test_a_second_start_reads_nothing_but_the_cache(
    corpus_of: Open, jsonl: Callable, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl([*texts, ""])
    first: list[str] = []
    corpus = corpus_of([path], say=first.append)
    monkeypatch.setattr(TokenCache, "made", lambda *a: pytest.fail("encoded again"))
    monkeypatch.setattr(TokenCache, "_train", lambda *a: pytest.fail("read again"))
    second: list[str] = []
    again = corpus_of([path], say=second.append)
    assert again.fingerprint == corpus.fingerprint
    assert second == first
    assert "left out: 1 empty document" in first
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


def test_what_a_killed_process_left_is_swept_and_what_a_live_one_writes_is_not(
    corpus_of: Open, jsonl: Callable, texts: list[str], tmp_path: Path
) -> None:
    tokens = tmp_path / "cache" / "tokens"
    dead, foreign = tokens / f"{'0' * 32}.tmp-00", tokens / "of-another-program.tmp-00"
    for folder in (dead, foreign):
        folder.mkdir(parents=True)
        (folder / "ids.bin").write_bytes(b"12")
    with CacheWriter(tokens / ("1" * 32), 300) as living:
        corpus_of([jsonl(texts)])
        names = {folder.name for folder in tokens.glob("*.tmp-*")}
        assert names == {foreign.name, living._folder.name}
        assert [one.state for one in list_cache(tokens)].count("being written") == 1
        assert len(clear_cache(tokens)) == 1
        assert living._folder.exists()


@pytest.mark.parametrize("name", ["meta.json", "spans.npy", "link", "file", "fifo", "ids"])
def test_an_entry_made_up_to_harm_is_made_again(
    corpus_of: Open, jsonl: Callable, texts: list[str], tmp_path: Path, name: str
) -> None:
    path = jsonl(texts)
    before = corpus_of([path])
    folder, elsewhere = entry(tmp_path), tmp_path / "elsewhere"
    if name == "meta.json":
        (folder / name).write_text('{"a":' * 50_000 + "1" + "}" * 50_000)
    elif name == "spans.npy":
        (folder / name).unlink()
        with (folder / name).open("wb") as file:
            head = {"descr": "<i8", "fortran_order": False, "shape": (1 << 50, 3)}
            np.lib.format.write_array_header_1_0(file, head)
    elif name == "link":
        folder.rename(elsewhere)
        (elsewhere / "ids.bin").unlink()
        folder.symlink_to(elsewhere)
    elif name == "file":
        shutil.rmtree(folder)
        folder.write_text("")
    elif name == "fifo":
        (folder / "meta.json").unlink()
        os.mkfifo(folder / "meta.json")
    else:  # with a valid digest and seal
        ids = np.fromfile(folder / "ids.bin", "<u2")
        ids[-1] = 60_000
        (folder / "ids.bin").write_bytes(ids.tobytes())
        meta = json.loads((folder / "meta.json").read_text())
        del meta["seal"]
        meta["digest"] = digest(ids, np.load(folder / "spans.npy"))
        (folder / "meta.json").write_text(json.dumps({**meta, "seal": digest(json.dumps(meta))}))
    said: list[str] = []
    assert corpus_of([path], say=said.append).fingerprint == before.fingerprint
    assert any("are damaged" in line for line in said)
    assert name != "link" or (elsewhere / "meta.json").exists()


def test_an_entry_of_another_account_is_refused(
    corpus_of: Open, jsonl: Callable, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(texts)
    corpus_of([path])
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 4321)
    monkeypatch.setattr(store, "_ROOT", -1)
    with pytest.raises(DataError, match="belongs to another account"):
        corpus_of([path])


@pytest.mark.parametrize("change", ["overwrite", "cut", "poison", "replace", "remove"])
def test_a_shard_that_changes_under_a_run_is_named(
    corpus_of: Open, tmp_path: Path, change: str
) -> None:
    path = tmp_path / "a.bin"
    write_shard(path, np.arange(200), 300)
    corpus = corpus_of([path])
    corpus.check_unchanged()
    with Loader(corpus.train, rows=1, accumulate=1, seq_len=8, seed=0, prefetch=1) as loader:
        next(loader)
        data = bytearray(path.read_bytes())
        if change in ("overwrite", "poison"):
            data[1024:] = np.full(200, 299 if change == "overwrite" else 301, "<u2").tobytes()
            with path.open("r+b") as file:
                file.write(data)
            os.utime(path, ns=(1, 1))
        elif change == "cut":
            os.truncate(path, 1024 + 8)
        elif change == "replace":
            write_shard(path, np.zeros(5, int), 300)
        else:
            path.unlink()
        if change in ("replace", "remove"):  # the mapped data is unchanged
            corpus.check_unchanged()
            assert len({next(loader).micro[0]["ids"].max() for _ in range(3)}) == 3
            return
        with pytest.raises(DataError, match="while the run was reading it") as raised:
            corpus.check_unchanged()
        assert raised.value.where == str(path)
        if change != "overwrite":
            with pytest.raises(DataError, match=r"cut short|written to"):
                list(loader)


def test_a_path_that_is_not_utf_8_is_refused(corpus_of: Open, tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt"))
    path.write_text("text")
    with pytest.raises(DataError, match="not UTF-8"):
        corpus_of([path])


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
    assert "no tokenizer: documents begin with id 77" in said
    assert (entry(tmp_path) / "ids.bin").stat().st_size == 0


def test_a_tokenizer_beside_ids_that_is_not_named_is_said(
    corpus_of: Open, tmp_path: Path, texts: list[str]
) -> None:
    folder = tmp_path / "my tokens"
    folder.mkdir()
    write_shard(folder / "a.bin", np.arange(100), 300)
    beside, said = folder / "tokenizer.json", list[str]()
    Tokenizer.train(texts, 270).save(beside)
    corpus_of([folder / "a.bin"], say=said.append)
    with_it = f"; to use the one beside them: data.tokenizer='{beside}' model.vocab=270"
    assert f"no tokenizer: documents begin with id 0{with_it}" in said
    beside.write_text("{}")
    corpus_of([folder / "a.bin"], say=said.append)
    assert said[-1] == "no tokenizer: documents begin with id 0"


def test_text_ids_and_shards_mix_under_a_named_tokenizer_only(
    corpus_of: Open, jsonl: Callable, texts: list[str], tmp_path: Path
) -> None:
    tokenizer = Tokenizer.train(texts, 300)
    tokenizer.save(tmp_path / "t.json")
    write_shard(tmp_path / "a.bin", np.array([0, 1, 2, 3]), 300)
    paths = [tmp_path / "a.bin", jsonl([*texts[:2], [5, 6]])]
    for mixed in (paths, paths[1:]):
        with pytest.raises(DataError, match="text and token ids"):
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


@pytest.mark.parametrize("val", [-0.1, 1.0])
def test_what_is_no_fraction_is_refused(corpus_of: Open, jsonl: Callable, val: float) -> None:
    with pytest.raises(DataError, match="held-out fraction must be"):
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
    path, made = jsonl(texts), TokenCache.made
    first = corpus_of([path])
    theirs = entry(tmp_path)
    shutil.move(theirs, tmp_path / "theirs")

    def slow(*arguments: Any) -> Iterator[None]:
        reads, find = [], Path.rename

        def late(ours: Path, entry: Path) -> Path:
            reads.append(shutil.move(tmp_path / "theirs", theirs))
            return find(ours, entry)

        monkeypatch.setattr(Path, "rename", late)
        yield from made(*arguments)
        monkeypatch.setattr(Path, "rename", find)
        assert reads

    monkeypatch.setattr(TokenCache, "made", slow)
    assert corpus_of([path]).fingerprint == first.fingerprint
    assert [folder.name for folder in theirs.parent.iterdir()] == [theirs.name]


def test_progress_begins_at_once_and_each_phase_at_nothing_done(
    jsonl: Callable, texts: list[str], tmp_path: Path
) -> None:
    calls: list[tuple[str, int, int]] = []
    path = jsonl(texts)
    settings = DataConfig(paths=(str(path),))

    def prepare() -> list[str]:
        calls.clear()
        open_corpus(
            settings,
            300,
            8,
            cache=tmp_path / "cache",
            say=lambda line: None,
            progress=lambda *call: calls.append(call),
        )
        names = [call[0] for call in calls]
        return [name for i, name in enumerate(names) if names[i - 1 : i] != [name]]

    check, size = "checking the files", path.stat().st_size
    assert prepare() == [check, "reading", "training the tokenizer", "tokenising", check]
    assert calls[0] == (check, 0, 0)
    for what in ("reading", "tokenising"):
        phase = [call for call in calls if call[0] == what]
        assert phase[0] == (what, 0, size)
        assert phase[-1] == (what, size, size)
    assert prepare() == [check]


def test_a_file_is_read_once_and_again_when_anything_of_it_changes(
    corpus_of: Open,
    jsonl: Callable,
    texts: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    read: list[Path] = []
    digest_of = Source.digest

    def counted(source: Source, tick: Callable[[int], None] = lambda count: None) -> str:
        read.append(source.path)
        return digest_of(source, tick)

    monkeypatch.setattr(Source, "digest", counted)
    paths = [jsonl(texts), jsonl(texts[:20], "more.jsonl")]
    first = corpus_of(paths).fingerprint
    assert read == paths
    assert corpus_of(paths).fingerprint == first
    assert read == paths * 2  # recently written: another write might have the same times

    monkeypatch.setattr(store, "_SETTLED", -1.0)
    for _ in range(2):
        assert corpus_of(paths).fingerprint == first
    assert read == paths * 3
    status = paths[0].stat()
    paths[0].write_text(paths[0].read_text().replace("cat", "dog"))
    os.utime(paths[0], ns=(status.st_atime_ns, status.st_mtime_ns))  # the same size and time
    assert corpus_of(paths).fingerprint != first
    assert read == [*paths * 3, paths[0]]

    kept = tmp_path / "cache" / "digests.json"
    for damaged in (
        "",
        "[1]",
        '{"a": ',
        json.dumps(dict.fromkeys(json.loads(kept.read_text()), "?")),
    ):
        kept.write_text(damaged)
        read.clear()
        corpus_of(paths)
        assert read == paths
