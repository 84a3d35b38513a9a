"""Tests of ``minillm search`` through the program: a planted winner, a kill, and refused requests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from minillm_core.cli.main import main
from minillm_lab.search import Job

SMALL = (
    *("model.vocab=300", "model.dim=32", "model.layers=2", "model.heads=2", "model.kv_heads=2"),
    *("model.hidden=32", "train.rows=2", "train.seq_len=16", "eval.tokens=300", "train.lr=1e-5"),
)


@dataclass(frozen=True)
class Searched:
    """A finished search: its folder, the JSON document on stdout, and the lines on stderr."""

    out: Path
    found: dict[str, Any]
    said: str


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("given")
    text, space = folder / "text.txt", folder / "space.toml"
    text.write_text("\n\n".join(f"the {n} little cats sat on mat {n * n}" for n in range(400)))
    space.write_text("[train]\nlr = [1e-5, 1e-2]\nwarmup = [0.05, 0.9]\n")
    where = ("--data", str(text), "--preset", "tiny", "--device", "cpu", "--backend", "torch")
    return ("search", *where, "--space", str(space), "--tokens", "1280", "--budget", "20m", *SMALL)


@pytest.fixture(scope="module")
def whole(given: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Searched:
    """Search once, undisturbed, in this process."""
    out, said, shown = tmp_path_factory.mktemp("search") / "whole", StringIO(), StringIO()
    with redirect_stdout(said), redirect_stderr(shown):
        assert main([*given, "--out", str(out), "--json"]) == 0
    return Searched(out, json.loads(said.getvalue()), shown.getvalue())


@pytest.mark.slow
def test_a_planted_winner_is_found_and_a_killed_search_finds_the_same(
    given: tuple[str, ...],
    whole: Searched,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    killed, found = tmp_path / "killed", whole.found
    assert found["recipe"] == ["train.lr=0.01"]
    assert found["last"]["gain"]["high"] < 0
    assert re.search(r"^round 1, 427 tokens: train.lr=0.01  run 2 of 3", whole.said, re.MULTILINE)

    command = [sys.executable, "-m", "minillm_core", *given, "--out", str(killed)]
    runs, ends = killed / "runs", {signal.SIGTERM: 75, signal.SIGKILL: -9}
    for files, how in ((2, signal.SIGTERM), (6, signal.SIGKILL)):
        resumed = ["--resume"] * (how is signal.SIGKILL)
        with subprocess.Popen([*command, *resumed], stderr=subprocess.PIPE, env=os.environ) as one:
            while len(list(runs.glob("*.json"))) < files and one.poll() is None:
                time.sleep(0.02)
            one.send_signal(how)
            one.communicate()
        assert one.returncode == ends[how]
    assert "the search is not finished" in (killed / "best.toml").read_text("utf-8")
    before = {path.name: path.stat().st_mtime_ns for path in runs.glob("*.json")}
    assert main([*given, "--out", str(killed)]) == 2
    assert "the same command with --resume continues it" in capsys.readouterr().err
    at, folder = given.index("--space"), ("--out", str(killed), "--resume")
    other = tmp_path / "other.toml"
    other.write_text("[train]\nlr = [1e-5, 1e-2, 1e-1]\nwarmup = [0.05, 0.9]\n")
    assert main([*given[: at + 1], str(other), *given[at + 2 :], *folder]) == 2
    assert "search.json: space, values, train.lr: 0.1 only now" in capsys.readouterr().err
    # of the search that began, though plugins are installed that no space file names
    assert main([*given[:at], *given[at + 2 :], *folder]) == 0
    assert "train.lr=0.01" in capsys.readouterr().err
    after = {path.name: path.stat().st_mtime_ns for path in runs.glob("*.json")}
    assert before.items() <= after.items()
    best, same = (
        (out / "best.toml").read_text("utf-8").replace(str(out), "OUT")
        for out in (whole.out, killed)
    )
    assert same == best

    assert main([*given[:-1], "train.lr=2e-5", "--out", str(whole.out), "--resume"]) == 2
    assert "holds another search: its plan differs from this one's" in capsys.readouterr().err
    preset = str(whole.out / "best.toml")
    assert main(["plan", "--preset", preset, "--json"]) == 0  # usable like any other preset
    assert json.loads(capsys.readouterr().out)["settings"]["train"]["lr"]["value"] == 0.01


@pytest.mark.parametrize(
    ("begun", "fix"),
    [(False, "the same command starts again"), (True, "the same command with --resume --out {}")],
)
def test_a_signal_before_the_first_run_says_what_to_type(
    given: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    begun: bool,
    fix: str,
) -> None:
    """Where search.json is written already, the folder is refused without --resume."""

    def run(job: Job) -> None:
        if begun:
            (job.out / "search.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(Job, "run", run)
    out = tmp_path / "out"
    assert main([*given, "--out", str(out)]) == 130
    assert f"no run was finished\n  where: {out}\n  fix:   {fix.format(out)}" in (
        capsys.readouterr().err
    )
    assert main([*given, "--out", str(out), *["--resume"] * begun]) == 130  # as it says


@pytest.mark.slow
def test_runs_of_two_processes_are_those_of_one(
    given: tuple[str, ...],
    whole: Searched,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of two that share a device; test_ablate.py has one process on each of two."""
    two = tmp_path / "two"
    assert main([*given, "--processes", "2", "--out", str(two)]) == 0
    assert "starting 2 processes on cpu" in capsys.readouterr().err
    found, expected = (
        {file.name: json.loads(file.read_text())["run"]["curve"][-1] for file in out.glob("runs/*")}
        for out in (two, whole.out)
    )
    assert len(found) >= 8
    for name in found.keys() & expected.keys():
        assert found[name]["val_loss"] == expected[name]["val_loss"]
    result = json.loads((two / "search.json").read_text())
    assert result["recipe"] == ["train.lr=0.01"]
    kept = [json.loads(file.read_text())["wall_seconds"] for file in two.glob("runs/*")]
    assert sum(kept) == pytest.approx(result["spent_seconds"])


@pytest.mark.slow
def test_a_target_makes_a_length(
    given: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at, out = given.index("--tokens"), tmp_path / "out"
    command = [*given[:at], *given[at + 2 :], "--out", str(out)]
    assert main([*command, "train.lr=0.003", "--target", "4"]) == 0
    shown = capsys.readouterr().err
    assert re.search(r"looking for a loss of 4: .*  run 1 of 1,", shown)
    best = (out / "best.toml").read_text("utf-8")
    for text in (shown, best, (out / "search.md").read_text("utf-8")):
        assert re.search(r"a held-out loss of 4 is (not )?reached", text, re.IGNORECASE)
    train = tomllib.loads(best)["train"]
    assert train["minutes"] > 0
    assert "steps" not in train
    capsys.readouterr()
    command[-1] = str(tmp_path / "always")
    assert main([*command, "--target", "100"]) == 2
    assert "a loss of 100 is reached by the settings as they are" in capsys.readouterr().err
    command[-1] = str(tmp_path / "never")
    assert main([*command, "--target", "0.1", "--budget", "10s"]) == 1
    assert "do not reach a loss of 0.1 within 40% of the budget" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--tokens", "0"), "--tokens must be finite and above 0"),
        (("--tokens", "inf"), "--tokens must be finite and above 0"),
        (("--minutes", "1"), "--minutes and --tokens are given, and a search has one of them"),
        (("--budget", "soon"), "'soon' is not a time"),
        (("--budget", "0m"), "'0m' is not a time"),
        (("--resume",), "does not say which search"),
        (("--resume", "--out", "{}/none"), "holds no search to resume"),
        (("--out", "{}"), "holds a run of minillm train"),
        (("--out", "{}/ablation"), "ablation holds an ablation\n"),
        (("--out", "{}/ablation", "--resume"), "ablation holds an ablation\n"),
        (("--out", "{}/other", "--resume"), "--out with another folder, without --resume"),
        (("--space", "{}/idle.toml"), 'fix:   plugins = ["muon"] in the file'),
        (("train.steps=7",), "train.steps is given"),
        (("--data", "{}/nowhere.txt"), "nowhere.txt"),
        (("--space", "{}/nowhere.toml"), "space file cannot be read"),
        (("--plugins", "moun"), "did you mean 'muon'?"),
        (
            ("--plugins", "tensorboard", "--space", "{}/plugins.toml"),
            "it watches runs and changes none",
        ),
        (("--tokens", "100000000"), "the budget of 20:00 is too small"),
        (("--tokens", "100000000"), "m is the least; or shorter runs"),
        (("--gpus", "2"), "--gpus 2 needs NVIDIA GPUs: 0 found, on device cpu"),
        (("--gpus", "2"), "fix:   leave it out"),
        (("--tokens", "31"), "a run of 31 tokens is shorter than a step, which has 32 tokens"),
    ],
)
def test_what_cannot_be_searched_is_refused(
    given: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
    said: str,
) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "plugins.toml").write_text('plugins = ["muon"]')
    (tmp_path / "idle.toml").write_text("[muon]\nlr = [0.01, 0.04]")
    (tmp_path / "ablation").mkdir()
    (tmp_path / "ablation" / "ablation.json").write_text("{}")
    (tmp_path / "other" / "runs").mkdir(parents=True)
    out = () if "--out" in more or more == ("--resume",) else ("--out", str(tmp_path / "out"))
    assert main([*given, *out, *(one.format(tmp_path) for one in more)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert not (tmp_path / "out" / "runs").exists()
    assert not (tmp_path / "out" / "search.json").exists()  # another budget may be tried there


def test_a_length_is_asked_for(given: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    at = given.index("--tokens")
    assert main([*given[:at], *given[at + 2 :]]) == 2
    assert "--minutes 0.5, --tokens 1000000, or --target 3.5" in capsys.readouterr().err
