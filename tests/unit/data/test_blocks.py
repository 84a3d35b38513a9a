"""Tests of text in blocks: cached one by one, read in order while the rest is tokenised during training."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minillm_core as minillm
from minillm_core.data import Corpus, Documents, Loader, StepBatch, Tokenizer, store, tokenise
from minillm_core.data.blocks import Blocks
from minillm_core.data.documents import Blocked, Columns, digest
from minillm_core.errors import ConfigError, DataError, MinillmError
from minillm_core.nn.reference import Function
from minillm_core.plugins.sourcing import PLAIN

VOCAB = 10_000
PACKER = Function("mine", "minillm_data.best_fit:BestFitPacker", (("capacity", 7), ("buffer", 3)))
ARRANGED = {
    "end to end": {},
    "shuffled rows": {"windows": Function("mine", "minillm_data.shuffle_rows:shuffled", ())},
    "a packer": {"packer": PACKER},
}

blocks_of_lengths = st.lists(
    st.lists(st.integers(1, 30), min_size=1, max_size=5), min_size=1, max_size=4
)


class Given:
    """Available blocks of a text whose ids are all different."""

    vocab = VOCAB

    def __init__(self, lengths: Sequence[Sequence[int]]) -> None:
        self.asked, self.blocks, first = 0, list[Documents](), 0
        for block in lengths:
            ends = first + np.cumsum(block)
            ids = [range(end - n, end) for n, end in zip(block, ends, strict=True)]
            self.blocks.append(Documents.of(ids, VOCAB))
            first = int(ends[-1])

    @property
    def digest(self) -> str:
        return digest(" ".join(one.digest for one in self.blocks))

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.blocks)

    def block(self, number: int) -> Documents | None:
        self.asked = max(self.asked, number)
        return self.blocks[number] if number < len(self.blocks) else None

    def room(self, tokens: int) -> Columns:
        return self.blocks[0].room(tokens)

    def check_unchanged(self) -> None: ...


def steps(documents: Blocked, count: int, **more: Any) -> list[StepBatch]:
    given = {"rows": 1, "accumulate": 1, "seq_len": 6, "seed": 0} | more
    with Loader(documents, **given) as loader:
        return list(itertools.islice(loader, count))


def rows(found: Sequence[StepBatch], name: str = "ids") -> np.ndarray:
    return np.concatenate([batch[name] for step in found for batch in step.micro])


@pytest.mark.slow
@given(blocks_of_lengths, st.integers(0, 3))
@settings(deadline=None)
def test_each_block_is_shuffled_and_follows_the_one_before(
    lengths: list[list[int]], seed: int
) -> None:
    text = Given(lengths)
    count = 2 * text.tokens // 6 + 1
    read = rows(steps(text, count, seed=seed)).ravel()
    wanted: list[int] = []
    for epoch in range(8):
        for number, block in enumerate(text.blocks):
            key = (seed + epoch, number) if number else seed + epoch  # one block: as without blocks
            for index in np.random.default_rng(key).permutation(len(block)):
                wanted += block[int(index)].tolist()
    assert read.tolist() == wanted[: len(read)]


@pytest.mark.broad(1)
@pytest.mark.parametrize("by", ARRANGED.values(), ids=ARRANGED)
@given(lengths=blocks_of_lengths, place=st.integers(0, 10), ranks=st.sampled_from([1, 2, 4]))
@settings(deadline=None, max_examples=40)
def test_any_resume_and_any_ranks_read_the_same(
    by: dict[str, Function], lengths: list[list[int]], place: int, ranks: int
) -> None:
    text = Given(lengths)
    whole = steps(text, 12, by=by, rows=ranks)
    cursor = json.loads(json.dumps(whole[place].cursor))
    resumed = steps(Given(lengths), 11 - place, by=by, rows=ranks, cursor=cursor)
    np.testing.assert_array_equal(rows(resumed), rows(whole[place + 1 :]))
    parts = [steps(text, 12, by=by, rows=ranks, ranks=ranks, rank=rank) for rank in range(ranks)]
    for step in range(12):
        together = np.concatenate([rows(one[step : step + 1]) for one in parts])
        np.testing.assert_array_equal(together, rows(whole[step : step + 1]))


@given(blocks_of_lengths)
@settings(deadline=None, max_examples=25)
def test_shuffled_rows_are_every_token_once_and_stay_in_their_block(
    lengths: list[list[int]],
) -> None:
    text = Given(lengths)
    read = rows(steps(text, 2 * text.tokens, by=ARRANGED["shuffled rows"], seq_len=1)).ravel()
    assert sorted(read[: text.tokens].tolist()) == [*range(text.tokens)]
    assert sorted(read[text.tokens :].tolist()) == [*range(text.tokens)]
    ends = np.cumsum([one.tokens for one in text.blocks])
    for first, end in itertools.pairwise([0, *ends]):
        assert sorted(read[first:end].tolist()) == [*range(first, end)]


def test_a_block_is_asked_for_when_it_is_read() -> None:
    text = Given([[60], [60], [60]])
    steps(text, 1, seq_len=50, prefetch=1)
    assert text.asked == 1 or text.asked == 2  # the dataloader is a step or two ahead
    with pytest.raises(DataError, match="past the end"):
        steps(text, 1, cursor=steps(text, 1)[0].cursor | {"document": 3})


Open = Callable[..., Corpus]


@pytest.fixture
def files(tmp_path: Path, texts: list[str]) -> list[Path]:
    """Create texts in several formats, including a long one that is read in pieces."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n\n" for t in texts[:20]))
    (folder / "b.txt").write_text("\n".join(texts) * 300)  # longer than a piece
    (folder / "c.txt").write_text("")
    (folder / "d.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts[20:]))
    return [folder]


@pytest.fixture
def tokenizer(tmp_path: Path, texts: list[str]) -> str:
    path = tmp_path / "tokenizer.json"
    Tokenizer.train(texts, 300).save(path)
    return str(path)


def ids_of(documents: Documents) -> list[list[int]]:
    return [documents[index].tolist() for index in range(len(documents))]


def all_blocks(corpus: Corpus) -> list[Documents]:
    found = (corpus.train.block(number) for number in itertools.count())
    return list(itertools.takewhile(lambda one: one is not None, found))  # type: ignore[arg-type]


def places(cache: Path) -> dict[str, int]:
    return {one.name: one.stat().st_ino for one in (cache / "tokens").iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("given", [True, False], ids=["a tokenizer", "none"])
def test_a_start_that_was_killed_is_followed_by_one_that_continues(
    corpus_of: Open,
    files: list[Path],
    tokenizer: str,
    given: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more = {"tokenizer": tokenizer} if given else {}
    whole = corpus_of(files, **more)
    store.disk.remove(tmp_path / "cache")
    monkeypatch.setattr(tokenise, "_BLOCK", 200)
    heard: list[str] = []
    cut = corpus_of(files, say=heard.append, **more)
    assert isinstance(cut.train, Documents)
    assert isinstance(whole.train, Documents)
    assert ids_of(cut.train) == ids_of(whole.train)
    assert ids_of(cut.val) == ids_of(whole.val)
    assert "left out: 20 blank lines" in heard
    made = places(tmp_path / "cache")
    assert len(made) > 4

    class Stop(Exception):
        pass

    commit, commits = store.CacheWriter.commit, [0]

    def stopping(writer: store.CacheWriter, *arguments: Any, **facts: Any) -> None:
        if commits[0] == 2:
            raise Stop
        commits[0] += 1
        commit(writer, *arguments, **facts)

    store.disk.remove(tmp_path / "cache")
    monkeypatch.setattr(store.CacheWriter, "commit", stopping)
    with pytest.raises(Stop):
        corpus_of(files, **more)
    monkeypatch.setattr(store.CacheWriter, "commit", commit)
    kept = places(tmp_path / "cache")
    assert len(kept) == 2
    again = corpus_of(files, **more)
    assert again.fingerprint == cut.fingerprint
    now = places(tmp_path / "cache")
    assert {name: now[name] for name in kept} == kept
    assert now.keys() == made.keys()


def test_the_rest_is_tokenised_beside_training(
    corpus_of: Open, files: list[Path], tokenizer: str, tmp_path: Path
) -> None:
    whole = corpus_of(files, val=str(files[0] / "d.jsonl"), tokenizer=tokenizer)
    assert isinstance(whole.train, Documents)
    size = {"tokenizer": tokenizer, "block": 5_000}
    corpus = corpus_of(files, val=str(files[0] / "d.jsonl"), **size)
    assert isinstance(corpus.train, Blocks)
    assert corpus.description.startswith("a first block, and about ")
    found = all_blocks(corpus)
    assert [ids for one in found for ids in ids_of(one)] == ids_of(whole.train)
    assert all(one.tokens >= 5_000 for one in found[:-1])
    assert corpus.train.tokens == whole.train.tokens
    corpus.check_unchanged()
    again = corpus_of(files, val=str(files[0] / "d.jsonl"), **size)
    assert again.fingerprint == corpus.fingerprint
    for number in (1, 2):  # a lost block is rebuilt
        store.disk.remove(again.train._cache.folder_of(again.train._cache.key, number))  # type: ignore[attr-defined]
    assert [one.digest for one in all_blocks(again)] == [one.digest for one in found]
    other = corpus_of(files, val=str(files[0] / "d.jsonl"), tokenizer=tokenizer, block=6_000)
    assert other.fingerprint != corpus.fingerprint


def test_text_is_held_out_of_the_first_block(
    corpus_of: Open, tmp_path: Path, texts: list[str]
) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    corpus = corpus_of([path], block=1_000)
    assert corpus.tokenizer is not None
    first, held = corpus.train.block(0), corpus.val
    assert first is not None
    both = ids_of(first) + ids_of(held)
    assert 20 <= len(both) < len(texts)
    assert sorted(corpus.tokenizer.decode(ids) for ids in both) == sorted(texts[: len(both)])
    assert 1_000 <= first.tokens + held.tokens < 1_100


def waiting(corpus: Corpus, number: int) -> Iterator[MinillmError]:
    try:
        corpus.train.block(number)
    except MinillmError as error:
        yield error


@pytest.mark.parametrize(
    ("line", "what"),
    [('{"text": 1}', "not a string"), ('{"text": "x"', "not a line of JSON")],
)
def test_what_is_wrong_further_on_comes_with_its_place(
    corpus_of: Open, files: list[Path], tokenizer: str, line: str, what: str
) -> None:
    path = files[0] / "d.jsonl"
    path.write_text(f"{path.read_text()}{line}\n")
    for name in ("c1.txt", "c2.txt"):  # longer than the read-ahead
        (files[0] / name).write_text((files[0] / "b.txt").read_text())
    corpus = corpus_of(files, tokenizer=tokenizer, block=5_000)
    (error,) = waiting(corpus, 1_000)
    assert isinstance(error, DataError)
    assert what in str(error)
    assert f"{path}, line 21, byte " in str(error)


def test_a_process_that_is_killed_is_an_error_and_the_next_start_continues(
    corpus_of: Open, files: list[Path], tokenizer: str, tmp_path: Path
) -> None:
    size = {"tokenizer": tokenizer, "block": 5_000}
    corpus = corpus_of(files, **size)
    process = corpus.train._tokenising  # type: ignore[attr-defined]
    assert process is not None
    process._process.send_signal(signal.SIGKILL)
    (error,) = waiting(corpus, 1_000)
    assert "it was killed, as happens if memory runs out" in str(error)
    assert "--resume" in str(error)
    again = corpus_of(files, **size)
    assert again.fingerprint == corpus.fingerprint
    assert all_blocks(again)


def test_files_that_change_before_they_are_read_are_refused(
    corpus_of: Open, files: list[Path], tokenizer: str
) -> None:
    corpus = corpus_of(files, tokenizer=tokenizer, block=5_000)
    cache = corpus.train._cache  # type: ignore[attr-defined]
    cache.sources[-1] = replace(cache.sources[-1], size=1)
    store.disk.remove(cache.folder_of(cache.key, 1))
    corpus.train._tokenising = None  # type: ignore[attr-defined]
    (error,) = waiting(corpus, 1)
    assert "the files changed since the run began to read them" in str(error)


def test_the_process_ends_with_the_one_that_trains(tmp_path: Path, texts: list[str]) -> None:
    import subprocess
    import sys

    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts) * 4_000)
    Tokenizer.train(texts, 300).save(tmp_path / "tokenizer.json")
    code = (
        "import sys, time; from pathlib import Path; "
        "from minillm_core.config.schema import DataConfig; "
        "from minillm_core.data import open_corpus; "
        f"c = DataConfig(paths=({str(path)!r},), tokenizer={str(tmp_path / 'tokenizer.json')!r}, "
        "block=2000); "
        f"found = open_corpus(c, 300, 8, cache=Path({str(tmp_path / 'cache')!r}), say=lambda line: None); "
        "print(found.train._tokenising._process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        os.kill(pid, 0)
        run.kill()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        if "Z" in Path(f"/proc/{pid}/stat").read_text().split(")")[1][:3]:
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{pid}").exists()


def test_what_data_block_has_no_effect_on_is_refused(
    corpus_of: Open, tmp_path: Path, tokenizer: str
) -> None:
    from minillm_core.data import write_shard

    shard = tmp_path / "a.bin"
    write_shard(shard, np.arange(200) % 100, 300)
    with pytest.raises(DataError, match="hold token shards"):
        corpus_of([shard], block=1_000)
    source = replace(PLAIN, source=Function("mine", "nowhere:at_all", ()))
    from minillm_core.config.schema import DataConfig
    from minillm_core.data import open_corpus

    with pytest.raises(DataError, match="come from plugin 'mine'"):
        open_corpus(
            DataConfig(block=1_000),
            300,
            8,
            cache=tmp_path / "c",
            say=lambda line: None,
            asked=source,
        )
    for data in ({"data.paths": ["a:1", "b:2"], "data.block": 10**6}, {"data.block": 100}):
        with pytest.raises(ConfigError, match=r"data\.block"):
            minillm.load("tiny", settings=data)


@pytest.mark.slow
def test_a_run_in_blocks_is_resumed_bit_for_bit(
    tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "text.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"{n} {t}"}) + "\n" for n in range(50) for t in texts)
    )
    chosen = {
        "data.paths": [str(path)],
        "data.block": 4_000,
        "train.seq_len": 32,
        "model.vocab": 512,
    }
    chosen |= {"model.layers": 1, "checkpoint.every": 7, "eval.tokens": 500}
    config = minillm.load("tiny", settings={**chosen, "train.steps": 60})
    plan = minillm.build_plan(config)
    whole = minillm.Run(plan, out=tmp_path / "whole")
    whole.train()
    part = minillm.Run(plan, out=tmp_path / "part")
    with part:
        for _ in zip(range(25), part.steps(), strict=False):
            pass
    store.disk.remove(tmp_path / "cache")
    resumed = minillm.Run.open(tmp_path / "part")
    resumed.train()

    def losses(out: Path) -> dict[int, float]:
        lines = (out / "metrics.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        return {one["step"]: one["loss"] for one in events if one["event"] == "step"}

    assert losses(tmp_path / "part") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == 60
