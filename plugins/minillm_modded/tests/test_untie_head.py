"""Tests of a head untied at two thirds of a run: initialising from other runs, resuming, and exporting."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm_core import Run, build_plan, load
from minillm_core.checkpoint.read import chosen_or_refuse
from minillm_core.cli.main import main
from minillm_core.errors import PlanError
from minillm_modded.untie_head import UntieHead
from minillm_modded.zero_init import ZeroInit

HEAD, EMBEDDING = "head.weight", "embedding.weight"
SMALL = {
    **{"model.vocab": 300, "model.dim": 32, "model.layers": 1, "model.heads": 2},
    **{"model.kv_heads": 2, "model.hidden": 32, "train.rows": 2, "train.seq_len": 16},
    **{"eval.tokens": 400, "eval.every": 0, "eval.samples": 0, "train.steps": 12},
    **{"train.compile": "off", "train.schedule": "constant", "train.lr": 0.01},
    **{"checkpoint.every": 4, "checkpoint.keep": 20, "train.dtype": "float32"},
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for n in range(24):
        words = f"{n}. A dark and stormy night, the {n * n}th of them.\n" * 6
        (folder / f"{n:02d}.txt").write_text(words)
    return folder


@pytest.fixture
def train(text: Path, tmp_path: Path) -> Any:
    """Return ``train("out", "torch", "untie_head", **settings)``, which trains a run in a folder to its end."""

    def run(out: str, backend: str, plugins: str, **settings: Any) -> Path:
        more = {key.replace("_", ".", 1): value for key, value in settings.items()}
        config = load(
            preset="tiny",
            plugins=plugins,
            data=str(text),
            settings={**SMALL, "backend": backend, **more},
        )
        for _ in Run(build_plan(config), out=tmp_path / out, cache=tmp_path / "cache").steps():
            pass
        return tmp_path / out

    return run


def held(out: Path, step: int) -> dict[str, np.ndarray]:
    return chosen_or_refuse(out, print, step=step).arrays()


def of(arrays: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {k.removesuffix(name): a for k, a in arrays.items() if k.endswith(f".{name}")}


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_run_has_one_matrix_for_two_thirds_and_then_two(train: Any, backend: str) -> None:
    pytest.importorskip("torch" if backend == "torch" else "mlx.core")
    out = train("run", backend, "untie_head,muon")
    for step, one in ((4, True), (8, True), (12, False)):
        arrays = held(out, step)
        head, embedding = of(arrays, HEAD), of(arrays, EMBEDDING)
        assert head.keys() == embedding.keys()
        assert len(head) == 3  # weights and both moments
        assert all(np.array_equal(head[k], embedding[k]) for k in head) == one


def test_a_branch_of_a_tied_run_takes_its_matrix_and_moments_for_both(
    train: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    out = train("tied", "torch", "", model_tied=True)
    words = ["--plugins", "untie_head", "model.tied=false", "checkpoint.every=1"]
    for flag, step, begins in (("--branch", 4, 4), ("--init", 8, 1)):
        to = tmp_path / f"from{step}"
        assert main(["train", flag, f"{out}@{step}", "--out", str(to), *words]) == 0
        said = "".join(capsys.readouterr())
        assert "the weights of" in said or "branched from" in said
        assert f"starts as a copy of {EMBEDDING}" not in said
        assert "newly initialised weights: head" not in said
        source, first = held(out, step), held(to, begins)
        np.testing.assert_array_equal(first[f"model.{HEAD}"], first[f"model.{EMBEDDING}"])
        apart = np.abs(first[f"model.{HEAD}"] - source[f"model.{EMBEDDING}"])
        assert (apart.max() < 0.02) if begins == 1 else not apart.any()  # --init: one further step
        if flag == "--branch":
            for key, array in of(source, EMBEDDING).items():
                np.testing.assert_array_equal(first[f"{key}{HEAD}"], array)


def test_a_branch_of_a_run_with_two_leaves_the_head_behind_and_says_so(
    train: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    out = train("two", "torch", "")
    for at, left in ((4, True), (8, False)):
        to = tmp_path / f"of-{at}"
        words = ["--plugins", "untie_head", "untie_head.until=0.5", "--out", str(to)]
        assert main(["train", "--branch", f"{out}@{at}", *words]) == 0
        said = " ".join("".join(capsys.readouterr()).split())
        line = f"{HEAD} starts as a copy of {EMBEDDING}, tied to it until 0.5 of the run"
        assert (line in said) == left
        first, source = held(to, at), held(out, at)
        kept = np.array_equal(first[f"model.{HEAD}"], source[f"model.{HEAD}"])
        assert kept == (not left)
        assert np.array_equal(first[f"model.{HEAD}"], first[f"model.{EMBEDDING}"]) == left


@pytest.mark.slow
def test_killed_on_either_side_of_the_parting_it_ends_with_the_same_bits(
    text: Path, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "minillm_core", "train"]
    more = {"backend": "torch", "train.steps": 180, "checkpoint.every": 5, "checkpoint.keep": 3}
    settings = [f"{key}={value}" for key, value in {**SMALL, **more}.items()]
    words = ["--preset", "tiny", "--plugins", "untie_head", "--data", str(text), *settings]
    whole, out = tmp_path / "whole", tmp_path / "killed"
    subprocess.run([*command, *words, "--out", str(whole)], check=True, capture_output=True)
    resume = ["--resume", "--out", str(out)]
    for given, passed in (([*words, "--out", str(out)], 30), (resume, 140), (resume, 10**6)):
        process = subprocess.Popen([*command, *given], stdout=subprocess.DEVNULL)
        while process.poll() is None:
            ends = [p.name.rpartition("-")[2] for p in out.glob("checkpoints/step-*")]
            if max((int(end) for end in ends if end.isdigit()), default=0) >= passed:
                process.send_signal(signal.SIGKILL)
            time.sleep(0.01)
        assert process.wait() == (0 if passed == 10**6 else -signal.SIGKILL)
    ours, theirs = held(out, 180), held(whole, 180)
    assert ours.keys() == theirs.keys()
    assert [k for k in theirs if not np.array_equal(ours[k], theirs[k])] == []


def test_a_tied_model_has_no_head_of_its_own(lab: Any) -> None:
    with pytest.raises(PlanError, match="needs a separate head") as caught:
        lab.plan(UntieHead(), tied=True)
    assert "model.tied=false" in str(caught.value.fix)


def test_a_head_that_starts_at_zero_is_no_embedding(lab: Any) -> None:
    with pytest.raises(PlanError, match="'zeroinit' gives initial values to 'head"):
        lab.plan(UntieHead(), ZeroInit(head=True))
