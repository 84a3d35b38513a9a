"""Tests of technique cards from several processes that take turns, and of time limits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from minillm_lab.card import read_cards

pytestmark = pytest.mark.slow

SMALL = (
    *("model.vocab=300", "model.dim=32", "model.layers=2", "model.heads=2", "model.kv_heads=2"),
    *("model.hidden=32", "train.rows=2", "train.seq_len=16", "eval.tokens=128"),
)


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"the {n} little cats sat on mat {n * n}" for n in range(400)))
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    trainer = BpeTrainer(
        vocab_size=280,
        initial_alphabet=ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
    )
    tokenizer.train([str(text)], trainer)
    tokenizer.save(str(tmp_path / "bpe.json"))
    files = ["--train", str(text), "--val", str(text), "--tokenizer", str(tmp_path / "bpe.json")]
    where = ["--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache"), "--device", "cpu"]
    shape = [part for one in SMALL for part in ("--set", one)]
    return [*files, *where, *shape, "--gpus", "2", "--steps", "4", "--commit", "abc"]


def cards(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.cards", *arguments]
    return subprocess.run(
        command, cwd=repository, capture_output=True, text=True, check=False, timeout=600
    )


def test_cards_come_from_paired_runs_of_several_processes(
    given: list[str], tmp_path: Path, repository: Path
) -> None:
    none = cards(repository, *given, "--only", "muon,relu2", "--minutes", "0.0001")
    assert none.returncode == 75, none.stderr
    made = cards(repository, *given, "--only", "muon,relu2")
    assert made.returncode == 0, made.stdout + made.stderr
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*seed*.json")}
    assert len(before) >= 20
    again = cards(repository, *given, "--only", "muon,relu2")
    assert again.returncode == 0, again.stdout + again.stderr
    assert all(path.stat().st_mtime_ns == at for path, at in before.items())

    unknown = cards(repository, *given, "--only", "muon,nothing")
    assert unknown.returncode == 2
    assert "--only: nothing: not in benchmarks/card_table.py" in unknown.stderr
    absent = cards(repository, *given, "--only", "liger", "--out", str(tmp_path / "none"))
    assert absent.returncode == 1
    assert "liger is not measured" in absent.stdout  # it needs a GPU

    to = ["--cards", str(tmp_path / "cards"), "--kept", str(tmp_path / "kept")]
    collected = cards(repository, "--collect", str(tmp_path / "out"), *to)
    assert collected.returncode == 0, collected.stderr
    (muon,) = read_cards("muon", [tmp_path / "cards"])
    assert (muon.company, muon.seeds, muon.commit) == ((), (0, 1, 2, 3, 4), "abc")
    (relu2,) = read_cards("relu2", [tmp_path / "cards"])
    assert relu2.company == ("muon",)
    kept = [json.loads(path.read_bytes()) for path in (tmp_path / "kept").iterdir()]
    assert {name for one in kept for name in one["figures"]["plugins"]} == {"muon", "relu2"}
    assert all("curve" not in run for one in kept for run in one["figures"]["runs"])
