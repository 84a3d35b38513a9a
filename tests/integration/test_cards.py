"""Tests of technique cards from several processes that take turns, and of time limits."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from benchmarks.cards import main
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


@pytest.fixture
def cards(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[Any, str, str]]:
    """Run the script here, which starts processes that train: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["cards", *arguments])
        try:
            code = main()
        except SystemExit as error:
            code = error.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # it leaves pipes open to its end
def test_cards_come_from_paired_runs_of_several_processes(
    given: list[str], tmp_path: Path, cards: Callable[..., tuple[Any, str, str]]
) -> None:
    code, out, err = cards(*given, "--only", "muon,relu2", "--minutes", "0.0001")
    assert code == 75, out + err
    code, out, err = cards(*given, "--only", "muon,relu2")
    assert code == 0, out + err
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*seed*.json")}
    assert len(before) >= 20
    code, out, err = cards(*given, "--only", "muon,relu2")
    assert code == 0, out + err
    assert all(path.stat().st_mtime_ns == at for path, at in before.items())

    code, _, err = cards(*given, "--only", "muon,nothing")
    assert code == 2
    assert "--only: nothing: not in benchmarks/card_table.py" in err
    code, out, _ = cards(*given, "--only", "liger", "--out", str(tmp_path / "none"))
    assert code == 1
    assert "liger is not measured" in out  # it needs a GPU

    to = ["--cards", str(tmp_path / "cards"), "--kept", str(tmp_path / "kept")]
    code, out, err = cards("--collect", str(tmp_path / "out"), *to)
    assert code == 0, out + err
    (muon,) = read_cards("muon", [tmp_path / "cards"])
    assert (muon.company, muon.seeds, muon.commit) == ((), (0, 1, 2, 3, 4), "abc")
    (relu2,) = read_cards("relu2", [tmp_path / "cards"])
    assert relu2.company == ("muon",)
    kept = [json.loads(path.read_bytes()) for path in (tmp_path / "kept").iterdir()]
    assert {name for one in kept for name in one["figures"]["plugins"]} == {"muon", "relu2"}
    assert all("curve" not in run for one in kept for run in one["figures"]["runs"])
