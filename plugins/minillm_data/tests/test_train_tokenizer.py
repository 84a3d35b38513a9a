"""Tokenizer training: the same files give the same tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from minillm_core import DataError
from minillm_core.documents import END_OF_TEXT, Tokenizer
from minillm_data.train_tokenizer import train_tokenizer

Write = Callable[..., Path]
Program = Callable[..., tuple[int, str, str]]
Prose = Callable[..., list[str]]


def test_the_same_files_give_the_same_tokenizer(prose: Prose, jsonl: Write, tmp_path: Path) -> None:
    path = jsonl([{"text": text} for text in prose(200)])
    first, report = train_tokenizer([path], tmp_path / "a.json", vocab=350)
    second, _ = train_tokenizer([path], vocab=350)
    assert first.digest == second.digest == report["sha256"]
    assert Tokenizer.load(tmp_path / "a.json", 350).digest == first.digest
    assert json.loads(first.text())["model"]["vocab"][END_OF_TEXT] == 0
    assert report["entries"] == first.size == 350
    assert report["sample_bytes"] == report["text_bytes"] > 0


def test_little_text_gets_few_entries(prose: Prose, jsonl: Write) -> None:
    path = jsonl([{"text": text} for text in prose(2000)])
    _, report = train_tokenizer([path])
    assert report["entries"] <= max(512, path.stat().st_size // 800)


def test_the_command(prose: Prose, jsonl: Write, tmp_path: Path, program: Program) -> None:
    path = jsonl([{"text": text} for text in prose(100)] + [{"ids": [1]}])
    words = ("data", "train-tokenizer", str(path), "--to", str(tmp_path / "t" / "own.json"))
    code, out, err = program(*words, "--vocab", "300", "--json")
    assert code == 0, err
    assert json.loads(out)["notes"] == {"left out: documents that are ids": 1}
    code, _, err = program(*words)
    assert code == 2
    assert "there is a file already" in err


def test_what_gives_no_tokenizer_is_refused(jsonl: Write, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no text"):
        train_tokenizer([jsonl([{"ids": [1, 2]}])])
    path = jsonl([{"text": "abc"}])
    with pytest.raises(DataError, match="at least 257 entries"):
        train_tokenizer([path], vocab=100)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        train_tokenizer([path], tmp_path / "file" / "t.json", vocab=300)
