"""Processes of torchrun over gloo: the same training as in one process, saved, resumed, stopped, lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.slow

STEPPED = Path(__file__).with_name("stepped.py")
SETTINGS = (
    *("--preset", "tiny", "--device", "cpu", "--backend", "torch"),
    *("model.dim=32", "model.layers=2", "model.vocab=300"),
    *("train.seq_len=32", "train.rows=4", "train.accumulate=2", "eval.tokens=1024", "eval.every=4"),
)


def torchrun(size: int, *command: str) -> subprocess.Popen[str]:
    """Start a command in some processes of one torchrun."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def run(size: int, *command: str, code: int = 0) -> str:
    """Run a command in some processes, to its end."""
    if size == 1:
        line = [sys.executable, *command]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        said, ended = done.stdout + done.stderr, done.returncode
    else:
        process = torchrun(size, *command)
        said, _ = process.communicate(timeout=600)
        ended = process.returncode
    assert ended == code, said
    return said


def train(size: int, out: Path, text: Path, *more: str, code: int = 0) -> str:
    """Train in some processes."""
    command = ["-m", "minillm_core", "train", *SETTINGS, "--data", str(text), "--out", str(out)]
    return run(size, *command, *more, code=code)


def losses(out: Path, event: str = "step", key: str = "loss") -> dict[int, float]:
    """Read figures of a run by step."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[key] for line in lines if line["event"] == event}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text to train on."""
    file = tmp_path_factory.mktemp("text") / "words.txt"
    file.write_text("".join(f"{n} times {n + 1} is {n * (n + 1)}.\n" for n in range(4000)))
    return file


def stepped(size: int, split: str, out: Path, *more: str) -> Mapping[str, Any]:
    """Train plans in some processes, and by one: see stepped.py."""
    run(size, str(STEPPED), "torch", str(out), split, *more)
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    ("size", "split", "how"),
    [
        (2, "micro", "alone,off,updates"),
        (2, "rows", "alone,updates"),
        (4, "micro", "alone,updates"),
    ],
)
def test_any_number_of_ranks_trains_alike(size: int, split: str, how: str, tmp_path: Path) -> None:
    found = stepped(size, split, tmp_path / "found.json", "cases", how)
    assert {"plain", "muon", "moe", "speedrun"} <= found.keys()
    for name, met in found.items():
        for kind, case in met.items():
            assert case["same"], f"{name}, {kind}: the ranks have not the same weights"
            assert case["figures"] < 1e-5, f"{name}, {kind}: {case['figures']} from one process"
            assert case["nats"] < 1e-6, f"{name}, {kind}: evaluated apart"
        shares = met["updates"]["bytes"]
        assert max(shares) < 1.1 * met["updates"]["all"] / size, f"{name}: {shares}"


def test_divided_updates_are_those_of_every_kind_of_parameter(tmp_path: Path) -> None:
    """Views, followers, narrow and other state, turns, frozen parameters, dtypes, compiled stages."""
    found = stepped(2, "micro", tmp_path / "found.json", "more", "off,updates")
    for name, met in found.items():
        case = met["updates"]
        assert case["same"], f"{name}: the ranks have not the same weights"
        assert case["figures"] < 1e-5, f"{name}: {case['figures']} from undivided updates"
        assert case["nats"] < 1e-6, f"{name}: evaluated apart"
        assert case["arrays"] < 1e-5, f"{name}: {case['arrays']} apart in a checkpoint"
        assert max(case["bytes"]) < 0.75 * case["all"], f"{name}: {case['bytes']}"


def start(out: Path, text: Path, *more: str) -> subprocess.Popen[str]:
    """Start a run in two processes."""
    given = [*SETTINGS, "--data", str(text), "--out", str(out), *more]
    return torchrun(2, "-m", "minillm_core", "train", *given)


def wait_for(out: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Wait until a run has made some steps."""
    end = time.monotonic() + 300
    while not (out / "metrics.jsonl").exists() or max(losses(out), default=0) < step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "the run makes no steps"
        time.sleep(0.1)


def workers(process: subprocess.Popen[str]) -> list[int]:
    """List the processes that a torchrun has started, by rank."""
    children = psutil.Process(process.pid).children()
    return [one.pid for one in sorted(children, key=lambda one: one.environ()["RANK"])]


def test_a_run_is_stopped_and_goes_on_in_another_number_of_processes(
    text: Path, tmp_path: Path
) -> None:
    steps = ("--steps", "60", "checkpoint.every=5")
    one, mixed = tmp_path / "one", tmp_path / "mixed"
    train(1, one, text, *steps)
    given, done = [*SETTINGS, "--data", str(text), "--out", str(mixed)], 0
    for size, shard, until in ((2, "updates", 10), (1, "auto", 20), (4, "auto", 40)):
        more = (*(("--resume",) if done else ()), f"mesh.shard={shard}")
        command = ["-m", "minillm_core", "train", *given, *steps, *more]
        process = torchrun(size, *command)
        wait_for(mixed, until, process)
        process.terminate()
        said, _ = process.communicate(timeout=120)
        assert json.loads((mixed / "run.json").read_text())["exit"] == 75, said
        assert f"resumed after step {done}" in said or not done
        done = max(losses(mixed))
        assert until <= done < 60
    said = train(2, mixed, text, "--resume", *steps, "mesh.shard=off")
    assert f"resumed after step {done}" in said
    assert "mesh.shard=off" in said
    assert json.loads((mixed / "run.json").read_text())["shard"] == "off"
    alike(one, mixed)


def alike(one: Path, other: Path) -> None:
    """Compare two runs: the same losses of every step, the same evaluations."""
    for event, key in (("step", "loss"), ("eval", "val_loss")):
        expected, found = losses(one, event, key), losses(other, event, key)
        assert expected.keys() == found.keys()
        for step, figure in expected.items():
            assert found[step] == pytest.approx(figure, abs=1e-4), f"{event} {step}"


def test_a_process_that_is_stopped_is_named(text: Path, tmp_path: Path) -> None:
    process = start(tmp_path / "run", text, "--steps", "100000")
    wait_for(tmp_path / "run", 3, process)
    lost = workers(process)[1]
    os.kill(lost, signal.SIGSTOP)
    began = time.monotonic()
    said, _ = process.communicate(timeout=120)
    assert "rank 0: rank 1 has not answered for" in said
    assert process.returncode != 0
    assert time.monotonic() - began < 75


def test_a_process_that_is_killed_ends_the_run(text: Path, tmp_path: Path) -> None:
    out, straight = tmp_path / "run", tmp_path / "straight"
    steps = ("--steps", "60", "checkpoint.every=5", "checkpoint.minutes=0", "--deterministic")
    process = start(out, text, *steps)
    wait_for(out, 12, process)
    os.kill(workers(process)[1], signal.SIGKILL)
    said, _ = process.communicate(timeout=120)
    assert process.returncode != 0, said
    train(2, out, text, "--resume", *steps)
    assert sorted(losses(out)) == list(range(1, 61))
    train(2, straight, text, *steps)  # at one number of processes the same bits
    assert losses(out) == losses(straight)
    for file in ("model.safetensors", "optimizer.safetensors"):
        saved = [one / "checkpoints" / "step-00000060" / file for one in (out, straight)]
        assert saved[0].read_bytes() == saved[1].read_bytes(), file


def test_updates_of_one_process_are_not_divided(text: Path, tmp_path: Path) -> None:
    said = train(1, tmp_path / "run", text, "mesh.shard=updates", code=2)
    assert "updates cannot be divided: one process trains" in said
    assert "mesh.shard=auto" in said
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_divided_is_refused(text: Path, tmp_path: Path) -> None:
    said = train(2, tmp_path / "run", text, "train.rows=3", "train.accumulate=1", code=1)
    assert "2 processes cannot divide a step of 1 micro-batches of 3 rows" in said
    assert not (tmp_path / "run").exists()
