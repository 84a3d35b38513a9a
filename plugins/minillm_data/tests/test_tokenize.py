"""Tokenization into shards: ids per document, and the same bytes after a kill."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minillm_core import ConfigError, DataError
from minillm_core.documents import Reading, Tokenizer, find, map_shard
from minillm_data import tokenize as module
from minillm_data.tokenize import tokenize
from minillm_data.train_tokenizer import train_tokenizer

Write = Callable[..., Path]
Program = Callable[..., tuple[int, str, str]]
Prose = Callable[..., list[str]]


def documents_in(folder: Path) -> list[list[int]]:
    """Read the documents of a folder's shards, splitting at the end-of-text id, 0."""
    found: list[list[int]] = []
    for path in sorted(folder.glob("*.bin")):
        ids = map_shard(path)[0].tolist()
        assert ids[0] == 0, "a shard begins with a document"
        for token in ids:
            if token == 0:
                found.append([])
            else:
                found[-1].append(token)
    return found


def native_ids(tokenizer: Path, texts: list[str]) -> list[list[int]]:
    native = tokenizers.Tokenizer.from_file(str(tokenizer))
    native.encode_special_tokens = True
    return [native.encode(text, add_special_tokens=False).ids for text in texts]


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=6
    )
)
def test_ids_are_those_of_tokenizers(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_file: Path, texts: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("ids")
    lines = (json.dumps({"text": text}) + "\n" for text in [*texts, "<|endoftext|> a" + "-" * 5000])
    (folder / "a.jsonl").write_text("".join(lines))
    report = tokenize([folder / "a.jsonl"], folder / "out", tokenizer=tokenizer_file)
    expected = native_ids(tokenizer_file, [*texts, "<|endoftext|> a" + "-" * 5000])
    assert documents_in(folder / "out") == expected
    assert report["documents"] == len(expected)
    assert report["tokens"] == sum(map(len, expected)) + len(expected)
    assert report["notes"] == {}


def test_a_document_is_in_one_shard_and_ids_come_as_they_are(
    jsonl: Write, tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHARD_TOKENS", 20)
    records = [{"ids": [7] * n} for n in (5, 5, 30, 1, 1)] + [{"ids": [0, 8]}, {"text": "abc"}]
    report = tokenize([jsonl(records)], tmp_path / "out", tokenizer=tokenizer_file)
    found = documents_in(tmp_path / "out")
    assert found == [
        [7] * 5,
        [7] * 5,
        [7] * 30,
        [7],
        [7],
        [8],
        *native_ids(tokenizer_file, ["abc"]),
    ]
    assert len(report["files"]) == 2
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_without_a_tokenizer_one_is_trained(prose: Prose, jsonl: Write, tmp_path: Path) -> None:
    texts = prose(300)
    path = jsonl([{"text": text} for text in texts])
    report = tokenize([path], tmp_path / "out", vocab=400)
    own = tmp_path / "out" / "tokenizer.json"
    trained, _ = train_tokenizer([path], vocab=400)
    assert Tokenizer.load(own, 400).digest == trained.digest == report["tokenizer"]
    assert report["vocab"] == 400
    assert documents_in(tmp_path / "out") == native_ids(own, texts)


def test_ids_alone_need_no_tokenizer(jsonl: Write, tmp_path: Path) -> None:
    report = tokenize([jsonl([{"ids": [70_000, 1]}, {"ids": [2]}])], tmp_path / "out", vocab=80_000)
    assert report["tokenizer"] is None
    ids, _ = map_shard(tmp_path / "out" / "part-00000.bin")
    assert ids.dtype == np.uint32
    assert ids.tolist() == [0, 70_000, 1, 0, 2]
    with pytest.raises(DataError, match="id 70000 at index 0"):
        tokenize([jsonl([{"ids": [70_000]}])], tmp_path / "other", vocab=70_000)
    assert not (tmp_path / "other").exists()


def test_text_and_ids_need_the_tokenizer_of_the_ids(jsonl: Write, tmp_path: Path) -> None:
    path = jsonl([{"text": "abc"}, {"ids": [1]}])
    with pytest.raises(DataError, match="the data contain both text and token ids"):
        tokenize([path], tmp_path / "out")


@pytest.mark.parametrize("ids", ["two bytes", "four bytes"])
@pytest.mark.parametrize("format", ["bin", "bin2d"])
def test_sets_of_the_first_trainer_are_read_as_they_were_written(
    jsonl: Write, tmp_path: Path, format: str, ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minillm_core.data import open_documents

    monkeypatch.setattr(module, "SHARD_TOKENS", 20)
    large = 70_000 if ids == "four bytes" else 9
    records = [[large], [1, 2, 3], [4] * 30, [5, large]]
    path = jsonl([{"ids": one} for one in records])
    seq_len = 9 if format == "bin2d" else None
    out = tmp_path / "out"
    vocab = 1 << 17 if large > 9 else None
    report = tokenize([path], out, vocab=vocab, format=format, seq_len=seq_len)
    reading = Reading(1 << 17)
    found: list[list[int]] = []
    for source in find([str(out)], lambda line: None):
        assert source.format.read is not None
        found += [np.asarray(one).tolist() for one in source.format.read(source.path, "", reading)]
    whole = [[0, *one] for one in records]
    assert found == (whole if format == "bin" else [one[:10] for one in whole])
    cut = {"cut: tokens of documents longer than 10": 21} if format == "bin2d" else {}
    assert report["notes"] == cut
    if large == 9:  # of a set that names another id than 0
        for one in out.glob("*.meta.json"):
            meta = json.loads(one.read_bytes())
            one.write_text(json.dumps({**meta, "end_of_text_id": 3}))
        tokenize([out], again := tmp_path / "again")
        assert map_shard(next(again.glob("*.bin")))[0].tolist()[:4] == [3, 0, 9, 3]
        none = {"tokenizer": None, "vocab": 10, "cache": tmp_path / "cache", "say": print}
        opened = open_documents([str(out)], **none)
        assert opened[0].tolist() == [3, 0, 9]
    metas = [json.loads(one.read_bytes()) for one in sorted(out.glob("*.meta.json"))]
    assert [one["num_samples"] for one in metas] == [3, 1]
    assert [one["ids"]["largest"] for one in metas] == [large, large]
    assert {one["ids"]["dtype"] for one in metas} == {"uint32" if large > 9 else "uint16"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"format": "bins"}, "there is no format 'bins'"),
        ({"format": "bin2d"}, "bin2d needs the length of its samples"),
        ({"format": "bin", "seq_len": 8}, "bin has no --seq-len"),
        ({"seq_len": 8}, "shards has no --seq-len"),
        ({"format": "bin2d", "seq_len": 0}, "samples of 0 tokens"),
    ],
)
def test_an_option_without_effect_is_refused(
    jsonl: Write, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        tokenize([jsonl([{"ids": [1]}])], tmp_path / "out", **options)
    assert raised.value.fix
    assert not any("out" in name for name in os.listdir(tmp_path))


def test_what_cannot_be_read_stops_or_is_counted(
    tmp_path: Path, tokenizer_file: Path, program: Program
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n[]\n{"text": "b"}\n\xff\n[]\n')
    words = ("data", "tokenize", str(path), "--to", str(tmp_path / "o"))
    words += ("--tokenizer", str(tokenizer_file))
    code, _, err = program(*words)
    assert code == 2
    assert f"{path}, line 2, byte 14" in err
    assert not (tmp_path / "o").exists()
    code, out, _ = program(*words, "--malformed", "skip", "--json")
    assert code == 0
    assert json.loads(out)["notes"] == {
        "left out: a list instead of a JSON object": 2,
        "left out: not UTF-8": 1,
    }
    code, _, err = program(*words, "--malformed", "skp")
    assert code == 2
    assert "did you mean skip?" in err


@pytest.mark.parametrize("command", ["tokenize", "train-tokenizer"])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_chats_are_refused_with_the_command_that_reads_them(
    tmp_path: Path, program: Program, command: str, suffix: str
) -> None:
    path, records = tmp_path / f"my chats{suffix}", [{"messages": []}, {"text": "a b c " * 100}]
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(one) + "\n" for one in records))
    else:
        table = pyarrow.table({"messages": [[{"role": "user", "content": "a"}]]})
        pyarrow.parquet.write_table(table, path)
    words = ("data", command, str(path), "--to", str(tmp_path / "o"), "--vocab", "300")
    code, _, err = program(*words)
    assert code == 2
    assert 'chat data: "messages"' in err
    assert err.rstrip().endswith(f"minillm train --task sft --data '{path}'")
    assert "--chats" not in err
    if suffix == ".jsonl":
        code, out, _ = program(*words, "--malformed", "skip", "--json")
        assert code == 0
        (note,) = json.loads(out)["notes"].items()
        assert note == ("left out: chat data, which minillm train --task sft reads", 1)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b"", "the data are empty"),
        ("a.jsonl", b"\n\n", "the data are empty"),
        ("a.bin", b"x", "this is a token shard already"),
    ],
)
def test_what_gives_no_shard_is_refused(
    tmp_path: Path, tokenizer_file: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said) as raised:
        tokenize([tmp_path / name], tmp_path / "out", tokenizer=tokenizer_file)
    assert raised.value.fix
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_run_trains_on_the_shards(
    prose: Prose, jsonl: Write, tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    path = jsonl([{"text": text} for text in prose(200)])
    code, out, err = program("data", "tokenize", str(path), "--to", "my tokens", "--vocab", "300")
    assert code == 0, err
    typed = shlex.split(out.splitlines()[-1].removeprefix("next: minillm "))
    sizes = (
        "model.layers=1",
        "model.dim=16",
        "train.seq_len=16",
        "eval.tokens=32",
        "eval.samples=0",
    )
    assert program(*typed, *sizes, "--preset", "tiny", "--steps", "1", "--device", "cpu")[0] == 0


KILLED = """
import sys
from minillm_data import tokenize as module

module.SHARD_TOKENS = 8000
module.tokenize([sys.argv[1]], sys.argv[2], vocab=400)
"""


def start(path: Path, to: Path) -> subprocess.Popen[bytes]:
    """Start the tokenization of a file into small shards."""
    command = [sys.executable, "-c", KILLED, str(path), str(to)]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def content(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in folder.iterdir()}


@pytest.fixture(scope="module")
def uninterrupted(
    prose: Prose, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, bytes], float]:
    """Return a file of many documents, what is written of it without a signal, and in how many seconds."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps({"text": one}) + "\n" for one in prose(8000)), "utf-8")
    began = time.monotonic()
    assert start(path, folder / "whole").wait() == 0
    return path, content(folder / "whole"), time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_command_goes_on_to_the_same_bytes(
    uninterrupted: tuple[Path, dict[str, bytes], float], tmp_path: Path, number: int
) -> None:
    path, whole, whole_seconds = uninterrupted
    to, kills = tmp_path / "killed", 0
    for share in (0.3, 0.5, 0.7, 0.8, 0.9):
        process = start(path, to)
        time.sleep(share * whole_seconds)
        process.send_signal(number)
        kills += process.wait() != 0
        assert not to.exists() or not any(".tmp" in name for name in os.listdir(to))
        if to.exists():
            break
    if not to.exists():
        assert start(path, to).wait() == 0
    assert kills, "every start was over before its signal"
    assert len(whole) > 10
    assert content(to) == whole
