"""Processes over gloo, as torchrun starts them: the same training as in one process, saved, resumed, stopped, lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.slow

SHORTER = "train.steps=10"
"""For kinds of parameters and updates: all phases of schedules and both of a turn, in half of the time."""
SETTINGS = (
    *("--preset", "tiny", "--device", "cpu", "--backend", "torch"),
    *("model.dim=32", "model.layers=2", "model.vocab=300"),
    *("train.seq_len=32", "train.rows=4", "train.accumulate=2", "eval.tokens=1024", "eval.every=4"),
)


def torchrun(size: int, *command: str) -> subprocess.Popen[str]:
    """Start a command in several processes of one torchrun."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


Run = Callable[..., str]
"""The fixture ``processes``: runs a module in some processes; returns what they said."""

Stepped = Callable[..., Mapping[str, Any]]
"""The fixture ``stepped``; returns what was found of each case."""


@pytest.fixture
def train(processes: Run) -> Run:
    """Train in some processes to the end of the run, or until it is stopped."""

    def run(size: int, out: Path, text: Path, *more: str, **ending: Any) -> str:
        given = [*SETTINGS, "--data", str(text), "--out", str(out), *more]
        return processes(size, "minillm_core", "train", *given, **ending)

    return run


def losses(out: Path, event: str = "step", key: str = "loss") -> dict[int, float]:
    """Read metrics of a run by step."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[key] for line in lines if line["event"] == event}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text to train on."""
    file = tmp_path_factory.mktemp("text") / "words.txt"
    file.write_text("".join(f"{n} times {n + 1} is {n * (n + 1)}.\n" for n in range(4000)))
    return file


@pytest.fixture
def stepped(processes: Run) -> Stepped:
    """Train plans in some processes, and by one: see stepped.py."""

    def run(size: int, split: str, out: Path, *more: str) -> Mapping[str, Any]:
        processes(size, "stepped", "torch", str(out), split, *more)
        return json.loads(out.read_text())

    return run


@pytest.mark.parametrize(
    ("size", "split", "how", "settings"),
    [
        (2, "micro", "alone,off,updates", ()),
        (2, "rows", "alone,updates", ()),
        (4, "micro", "alone,updates", ()),
        (4, "micro", "alone,weights", (SHORTER,)),
    ],
)
def test_any_number_of_ranks_trains_alike(
    size: int, split: str, how: str, settings: tuple[str, ...], stepped: Stepped, tmp_path: Path
) -> None:
    found = stepped(size, split, tmp_path / "found.json", "cases", how, *settings)
    assert {"plain", "muon", "moe", "speedrun"} <= found.keys()
    for name, met in found.items():
        for kind, case in met.items():
            assert case["same"], f"{name}, {kind}: the ranks have not the same weights"
            assert case["figures"] < 1e-5, f"{name}, {kind}: {case['figures']} from one process"
            assert case["nats"] < 1e-6, f"{name}, {kind}: evaluated apart"
        for kind in met.keys() - {"off"}:
            shares = met[kind]["bytes"]  # of optimizer state, and of sharded weights
            assert max(shares) < 1.1 * met[kind]["all"] / size, f"{name}, {kind}: {shares}"


def test_weights_are_divided_with_every_kind_of_parameter(stepped: Stepped, tmp_path: Path) -> None:
    """Views, followers, narrow state, frozen parameters, dtypes, compiled layers, shared rows, larger units."""
    names = "ema,schedule_free,layer_clip,untie_head,freeze,bfloat16,compiled"
    found = stepped(2, "micro", tmp_path / "found.json", names, "alone,weights", SHORTER)
    eighths = stepped(2, "micro", tmp_path / "8.json", "adam8bit", "alone,nudged,weights", SHORTER)
    given = "windows,traced", "alone,weights", "mesh.context=2", "mesh.unit=2", SHORTER
    rows = stepped(2, "rows", tmp_path / "rows.json", *given)
    for name, met in [*found.items(), *eighths.items(), *rows.items()]:
        case = met["weights"]
        # in bfloat16 another order of summation rounds differently: unsharded weights differ by 1.5e-4
        bound = 1e-3 if name == "bfloat16" else 1e-5
        if name == "adam8bit":  # a moment's last bit may change its level, of 255
            print(f"adam8bit: {case['figures']:.1e}, from itself {met['nudged']['figures']:.1e}")
            bound = max(bound, 3 * met["nudged"]["figures"])
        assert case["same"], f"{name}: the ranks have not the same weights"
        assert case["figures"] < bound, f"{name}: {case['figures']} from one process"
        assert case["nats"] < bound / 10, f"{name}: evaluated apart"
        assert max(case["bytes"]) < 0.6 * case["all"], f"{name}: {case['bytes']}"
        viewed = name in ("ema", "schedule_free")  # views are computed from whole masters
        assert (case["beside"] > 0) == viewed, f"{name}: {case['beside']} bytes beside rows"


def test_gradients_of_a_single_micro_batch_are_summed_in_float32(
    stepped: Stepped, tmp_path: Path
) -> None:
    """They are sent in the compute dtype; the sums are those of an all-reduce in float32."""
    found = stepped(2, "rows", tmp_path / "found.json", "bfloat16", "off,updates", SHORTER)
    (met,) = found.values()
    assert met["updates"]["same"]
    assert met["updates"]["losses"] == met["updates"]["expected"]


@pytest.mark.parametrize("size", [2, 4])
def test_a_process_starts_with_its_part_alone(size: int, processes: Run, tmp_path: Path) -> None:
    """Of weights that are divided: one process's values to the bit, and never a whole model in a process."""
    out, folder = tmp_path / "found.json", tmp_path / "saved"
    folder.mkdir()
    processes(size, "started", str(out), str(folder))
    found = json.loads(out.read_text())
    deep = found.pop("deep")
    assert {"plain", "muon", "moe", "speedrun", "ema", "bfloat16"} <= found.keys()
    for name, case in found.items():
        assert case["begun"], f"{name}: not the initial values of one process"
        assert case["shown"], f"{name}: no evidence of initial values that a plugin claims"
        assert case["resumed"], f"{name}: not the arrays of the checkpoint"
    whole, parameter = 4 * deep["numbers"], deep["parameter"]
    for rank, own in enumerate(deep["own"]):
        assert deep["updates"][rank]["tensors"] > 2 * whole  # a whole model would be counted
        assert own < 1.01 * 3 * whole / size  # masters and AdamW's state
        for when in ("begun", "read"):
            met = deep[when][rank]
            assert met["largest"] <= parameter / size, "of one tensor"
            assert met["tensors"] < own + 4 * parameter
            assert met["arrays"] < 0.15 * whole + 3 * parameter, "NumPy's, and Python's own objects"


def test_divided_updates_are_those_of_every_kind_of_parameter(
    stepped: Stepped, tmp_path: Path
) -> None:
    """Views, followers, narrow and other state, turns, frozen parameters, dtypes, compiled stages."""
    found = stepped(2, "micro", tmp_path / "found.json", "more", "off,updates", SHORTER)
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
        assert process.poll() is None, process.stdout and process.communicate()[0]
        assert time.monotonic() < end, "the run makes no steps"
        time.sleep(0.1)


def workers(process: subprocess.Popen[str]) -> list[int]:
    """List the processes that a torchrun has started, by rank."""
    children = psutil.Process(process.pid).children()
    return [one.pid for one in sorted(children, key=lambda one: one.environ()["RANK"])]


def test_a_run_is_stopped_and_goes_on_in_another_number_of_processes(
    train: Run, text: Path, tmp_path: Path
) -> None:
    """First by the end of torchrun, then by the same signal for every process."""
    steps = ("--steps", "70", "checkpoint.every=5")
    one, mixed = tmp_path / "one", tmp_path / "mixed"
    train(1, one, text, *steps)
    done = 0
    for size, divided, until in (
        (2, ("mesh.shard=updates", "mesh.context=2"), 10),
        (1, ("mesh.shard=auto", "mesh.context=1"), 20),
        (4, ("mesh.shard=weights", "mesh.context=2"), 30),
        (4, ("mesh.shard=auto", "mesh.context=2", "mesh.tensor=2"), 40),
        (4, ("mesh.context=1", "mesh.tensor=1", "mesh.pipeline=2", "mesh.schedule=gpipe"), 50),
    ):
        if done:
            stop = f"{until}:{mixed}"
            said = train(size, mixed, text, *steps, "--resume", *divided, code=75, stop=stop)
            assert f"resumed after step {done}" in said
        else:
            process = start(mixed, text, *steps, *divided)
            wait_for(mixed, until, process)
            process.terminate()
            said, _ = process.communicate(timeout=120)
        assert json.loads((mixed / "run.json").read_text())["exit"] == 75, said
        done = max(losses(mixed))
        assert until <= done < 70
    said = train(2, mixed, text, "--resume", *steps, "mesh.shard=off", "mesh.pipeline=1")
    assert f"resumed after step {done}" in said
    assert "mesh.shard=off" in said
    assert json.loads((mixed / "run.json").read_text())["shard"] == "off"
    alike(one, mixed)


def test_a_run_of_divided_weights_begins_with_others(
    processes: Run, train: Run, text: Path, tmp_path: Path
) -> None:
    """With a checkpoint, the weights of one, and those of a model directory: as one process does."""
    before, folder = tmp_path / "before", tmp_path / "folder"
    more = ("--plugins", "muon", "checkpoint.every=5", "eval.samples=0")
    train(1, before, text, *more, "--steps", "5")
    processes(1, "minillm_core", "export", str(before), "--to", str(folder))
    for name, given in (
        ("branch", ("--branch", str(before))),
        ("weights", ("--init", str(before))),
        ("directory", ("--init", str(folder), *more[:2])),
    ):
        one, two = tmp_path / f"{name}-1", tmp_path / f"{name}-2"
        said = [
            train(size, out, text, *given, *more[2:], "--steps", "9", *how)
            for size, out, how in ((1, one, ()), (2, two, ("mesh.shard=weights",)))
        ]
        assert "mesh.shard=weights" in said[1]
        alike(one, two)
    parts = [
        step / "rank-00001.safetensors" for step in (tmp_path / "branch-2/checkpoints").iterdir()
    ]
    assert len(parts) > 1
    assert all(part.is_file() for part in parts)


def alike(one: Path, other: Path) -> None:
    """Compare two runs: the same losses of every step, the same evaluations."""
    for event, key in (("step", "loss"), ("eval", "val_loss")):
        expected, found = losses(one, event, key), losses(other, event, key)
        assert expected.keys() == found.keys()
        for step, figure in expected.items():
            assert found[step] == pytest.approx(figure, abs=1e-4), f"{event} {step}"


SPIKE = '''
import numpy as np
from minillm_core import Plugin

class Spike(Plugin, api=1):
    """Asks for nonsense in some batches, by what is in it."""

    def on_batch(self, batch, phase):
        if phase != "train" or batch["ids"].sum() % 13:
            return batch
        return {**batch, "labels": np.full_like(batch["labels"], 297)}
'''


def test_processes_go_back_together_at_a_spike(train: Run, text: Path, tmp_path: Path) -> None:
    (tmp_path / "spike.py").write_text(SPIKE)
    more = ("--plugins", f"{tmp_path / 'spike.py'}:Spike", "--steps", "40")
    more = (*more, "checkpoint.every=4", "eval.samples=0")
    more = (*more, "train.spike=0.2", "train.rewind=5", "train.skip=3", "train.lr=0.01")
    alone, *others = (tmp_path / name for name in ("alone", "updates", "weights", "off"))
    train(1, alone, text, *more)
    expected = losses(alone, "rewind", "to")
    assert expected
    for out in others:
        train(2, out, text, *more, f"mesh.shard={out.name}")
        assert losses(out, "rewind", "to") == expected
        alike(alone, out)


def test_a_process_that_is_stopped_is_named(text: Path, tmp_path: Path) -> None:
    process = start(tmp_path / "run", text, "--steps", "100000")
    wait_for(tmp_path / "run", 3, process)
    lost = workers(process)[1]
    os.kill(lost, signal.SIGSTOP)
    began = time.monotonic()
    assert process.stdout is not None
    assert any("rank 0: rank 1 has not answered for" in line for line in process.stdout)
    assert time.monotonic() - began < 60
    os.kill(lost, signal.SIGKILL)  # what torchrun does after another half a minute
    said, _ = process.communicate(timeout=120)
    assert process.returncode != 0, said


def test_updates_of_one_process_are_not_divided(train: Run, text: Path, tmp_path: Path) -> None:
    said = train(1, tmp_path / "run", text, "mesh.shard=updates", code=2)
    assert "updates cannot be divided: one process trains" in said
    assert "mesh.shard=auto" in said
    assert not (tmp_path / "run").exists()


def agent(log: Path, port: int, hosts: bool, *command: str) -> subprocess.Popen[str]:
    """Start a torchrun in the role of one of two machines; ``hosts``: it hosts the rendezvous store."""
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job"]
    # a machine without a heartbeat for nine seconds is removed
    meeting += ["--rdzv-conf", f"is_host={hosts},keep_alive_interval=1,keep_alive_max_attempt=9"]
    line = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3", *meeting, *command]
    # pytorch's issue 135712: with a shared store no machine rejoins
    alone = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with log.open("a") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *line],
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **alone},
        )


def test_a_machine_that_is_lost_joins_again_and_the_run_goes_on(text: Path, tmp_path: Path) -> None:
    out, logs = tmp_path / "run", [tmp_path / name for name in ("one.log", "other.log")]
    more = ("--resume", "--steps", "60", "checkpoint.every=5", "eval.samples=0")
    given = ["--data", str(text), "--out", str(out), *more, "eval.every=100"]
    command = ["-m", "minillm_core", "train", *SETTINGS, *given]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    one, other = (agent(log, port, log is logs[0], *command) for log in logs)
    try:
        wait_for(out, 12, one)
        (worker,) = workers(other)
        for pid in (other.pid, worker):  # a machine that is switched off
            os.kill(pid, signal.SIGKILL)
        other.wait()
        other = agent(logs[1], port, False, *command)
        ended = [process.wait(timeout=240) for process in (one, other)]
    finally:
        for left in (one, other):
            left.terminate()
    said = "".join(log.read_text() for log in logs)
    assert ended == [0, 0], said
    assert ": another process of the run has ended" in said
    assert "resumed after step" in said
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if line["event"] == "step"] == list(range(1, 61))


LAUNCH = """
import sys
from minillm_mesh.torch_ranks import TorchRanks
sys.exit(TorchRanks.launch(2, sys.argv[1:]))
"""
ODD = '''
import os
from minillm_core import Plugin

class Odd(Plugin, api=1):
    """A plugin that fails on the rank that FAILS names."""

    def on_batch(self, batch, phase):
        if os.environ["RANK"] == os.environ.get("FAILS"):
            raise ValueError("a mistake of one rank")
        return batch
'''


def test_one_command_ends_as_one_process_does(text: Path, tmp_path: Path) -> None:
    """``minillm train --gpus 2``: exit code 75 after Ctrl-C, and a plugin's 3 although only one rank fails.

    An evaluation follows every step: of its one batch, which rank 1 has no part of.
    """
    out, plugin = tmp_path / "run", tmp_path / "odd.py"
    plugin.write_text(ODD)
    given = [*SETTINGS, "--data", str(text), "--out", str(out), "--plugins", f"{plugin}:Odd"]
    given.append("eval.every=1")
    command = [sys.executable, "-c", LAUNCH, "train", *given, "--steps", "100000"]
    pipes: Mapping[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }
    here = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=here, **pipes) as process:
        wait_for(out, 3, process)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 75, said
    assert said.count("saving step") == 1
    done = subprocess.run([*command, "--resume"], env=here | {"FAILS": "1"}, check=False, **pipes)
    assert done.returncode == 3, done.stdout
    assert "rank 1: plugin 'odd'" in done.stdout
    assert "a mistake of one rank" in done.stdout
    assert done.stdout.count("resumed after step") == 1


def test_an_error_of_one_rank_with_divided_weights_is_that_rank_s(
    train: Run, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an evaluation, where the other rank goes on: it is given the layers that it still needs."""
    (tmp_path / "odd.py").write_text(ODD)
    monkeypatch.setenv("FAILS", "0")
    more = ("--plugins", f"{tmp_path / 'odd.py'}:Odd", "mesh.shard=weights", "eval.share=1")
    said = train(2, tmp_path / "run", text, *more, code=3)
    assert "rank 0: plugin 'odd'" in said
    assert "a mistake of one rank" in said
    assert "rank 1: another process of the run has ended" in said


MUTE = '''
from minillm_core import Module, Plugin

class Mute(Plugin, api=1):
    """A plugin whose layers fail with a single row, as a sample has."""

    def build_attention(self, attn):
        attn.out.gate(Gate)

class Gate(Module):
    """y (B, T, H, D) -> y."""

    def forward(self, y):
        """y (B, T, H, D) -> (B, T, H, D)."""
        if y.shape[0] == 1:
            raise ValueError("a mistake in a layer")
        return y
'''


@pytest.mark.parametrize("unit", [1, 2])
def test_a_sample_that_fails_in_a_layer_of_divided_weights_is_no_end(
    unit: int, train: Run, text: Path, tmp_path: Path
) -> None:
    """Rank 0 alone writes it: what the layer has gathered is dropped before the next step."""
    (tmp_path / "mute.py").write_text(MUTE)
    more = ("--plugins", f"{tmp_path / 'mute.py'}:Mute", "mesh.shard=weights", f"mesh.unit={unit}")
    said = train(2, tmp_path / "run", text, *more, "eval.samples=1", "--steps", "2")
    assert said.count("warning: no sample: plugin 'mute' raised in Gate.forward") == 2
    assert losses(tmp_path / "run").keys() >= {1, 2}


def test_what_cannot_be_divided_is_refused(train: Run, text: Path, tmp_path: Path) -> None:
    said = train(2, tmp_path / "run", text, "train.rows=3", "train.accumulate=1", code=2)
    assert "2 processes cannot divide a step of 1 micro-batch of 3 rows" in said
    assert not (tmp_path / "run").exists()
