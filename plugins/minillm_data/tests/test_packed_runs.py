"""Runs with a packer, through the program: their output, branches, and reading without the packer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from minillm_core.cli.main import main

pytestmark = pytest.mark.slow

SMALL = (
    *("model.vocab=300", "model.dim=32", "model.layers=1", "model.heads=2", "model.kv_heads=2"),
    *(
        "model.hidden=32",
        "train.rows=2",
        "train.seq_len=16",
        "eval.tokens=100",
        "eval.samples=0",
        "checkpoint.every=3",
    ),
)


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "text"
    folder.mkdir()
    for n in range(24):
        (folder / f"{n:02d}.txt").write_text(f"{n}. A dark and stormy night.\n" * (n + 1))
    return folder


def test_a_run_counts_its_rows_and_branches_with_the_same_packer_alone(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, given = tmp_path / "out", ("--preset", "tiny", "--device", "cpu", *SMALL)
    assert main(["train", "--data", str(text), "--out", str(out), "--steps", "6", *given]) == 0
    plain = capsys.readouterr().err
    assert "packed:" not in plain

    packed = ["--plugins", "best_fit", "best_fit.buffer=5"]
    out = tmp_path / "packed"
    first = ["train", "--data", str(text), "--out", str(out), "--steps", "6", *given, *packed]
    assert main(first) == 0
    said = capsys.readouterr().err
    cursor = json.loads(next((out / "checkpoints").glob("*6/state.json")).read_text())["cursor"]
    counts = cursor["packed"]["counts"]
    assert 6 * 2 * 16 <= counts["room"] <= 6 * 2 * 17  # a row has its last label anyway
    padding = 1 - counts["used"] / counts["room"]
    line = (
        f"packed: {padding:.2%} padding, 0 of {counts['taken']:,} tokens cut, "
        f"{counts['split']:,} pieces begin inside a document"
    )
    assert line in said
    tokens = int(re.findall(r"documents \(([\d,]+) tokens\) from", said)[0].replace(",", ""))
    assert f"6 steps, {(counts['used'] + counts['cut']) / tokens:.2g} epochs" in said

    anew = "the data or their order changed: they are read from the start"
    branch = ["train", "--branch", str(out), "--steps", "9", "--out"]
    for name, more, starts_anew in (
        ("same", ["train.lr=0.001"], False),
        ("buffer", ["best_fit.buffer=6"], True),
        ("length", ["train.seq_len=8"], True),
        ("other", ["--plugins", "-best_fit,eos_align"], True),
        ("none", ["--plugins", "-best_fit"], True),
    ):
        assert main([*branch, str(tmp_path / name), *more]) == 0
        assert (anew in capsys.readouterr().err) == starts_anew, name


def test_held_out_text_is_read_alike_under_every_packer(text: Path, tmp_path: Path) -> None:
    found = []
    for plugins in ("", "best_fit", "eos_align", "length_buckets"):
        out = tmp_path / f"run-{plugins}"
        named = ["--plugins", plugins] if plugins else []
        start = ["train", "--data", str(text), "--out", str(out), "--steps", "1", *SMALL, *named]
        assert main([*start, "--preset", "tiny", "--device", "cpu", "eval.every=1"]) == 0
        events = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        found.append(next(e for e in events if e["event"] == "eval"))
    assert {one["step"] for one in found} == {0}
    assert len({one["val_loss"] for one in found}) == 1  # before the first step


def test_a_branch_with_rows_of_another_length_says_what_it_reads_twice(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, given = tmp_path / "out", ("--preset", "tiny", "--device", "cpu", *SMALL)
    shuffled = ["train", "--data", str(text), "--plugins", "shuffle_rows", *given]
    assert main([*shuffled, "--out", str(out), "--steps", "6"]) == 0
    capsys.readouterr()
    note = "the row length changed: some text of this epoch is read twice, some not"
    for name, more in (("same", ()), ("length", ("train.seq_len=8",))):
        branch = ["train", "--branch", str(out), "--steps", "8", "--out", str(tmp_path / name)]
        assert main([*branch, *more]) == 0
        assert (note in capsys.readouterr().err) == (name == "length")
