"""Tests of resumed runs, through the program: bitwise equal, or refused with the reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm_core.checkpoint.read import chosen_or_refuse, newest
from minillm_core.cli.main import main

SMALL = (
    *("model.vocab=300", "model.dim=32", "model.layers=2", "model.heads=2", "model.kv_heads=2"),
    *("model.hidden=32", "train.rows=2", "train.seq_len=16", "train.accumulate=2"),
    *("eval.tokens=100", "eval.every=4", "eval.samples=0"),
    *("checkpoint.every=3", "checkpoint.keep=9"),
)
STEPS = 10
NOISE = """
import numpy as np
from minillm_core import Plugin, random_stream

class Noise(Plugin, api=1):
    \"\"\"Replaces some ids by others, at random.\"\"\"

    def on_batch(self, batch, phase, progress):
        ids, random, share = batch["ids"], random_stream(), 0.2
        swap = random.random(ids.shape) < share * (1 + progress)
        return {**batch, "ids": np.where(swap, random.permuted(ids), ids).astype(np.int32)}
"""
SPIKE = """
import numpy as np
from minillm_core import Plugin

class Spike(Plugin, api=1):
    \"\"\"Asks for nonsense in some batches, by what is in it; reads the evaluations of the run as it is.\"\"\"

    def on_evaluated(self, evaluated, history, model):
        steps = [one.step for one in (*history, evaluated)]
        assert steps == sorted({*steps}), steps

    def on_batch(self, batch, phase):
        if phase != "train" or batch["ids"].sum() % 31:
            return batch
        return {**batch, "labels": np.full_like(batch["labels"], 297)}
"""


class Shell:
    """The program, its data, and its output."""

    def __init__(self, folder: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.text, self.capsys = folder, text, capsys
        self.out = folder / "out"
        self.err = ""

    def __call__(self, *arguments: str, out: Path | None = None) -> int:
        place = ("--out", str(out or self.out))
        code = main(["train", *place, *arguments])
        self.err = self.capsys.readouterr().err
        return code

    def start(self, *arguments: str, steps: int = STEPS, out: Path | None = None) -> int:
        given = ("--data", str(self.text), "--preset", "tiny", "--device", "cpu")
        return self(*given, "--steps", str(steps), *SMALL, *arguments, out=out)

    def killed_at(self, step: int, source: Path, name: str = "killed") -> Path:
        """Copy a finished run into the state that a kill after ``step`` would leave."""
        out = self.folder / name
        shutil.copytree(source, out)
        for path in (out / "checkpoints").iterdir():
            if int(path.name.removeprefix("step-")) > step:
                shutil.rmtree(path)
        record = json.loads((out / "run.json").read_text())
        (out / "run.json").write_text(json.dumps(record | {"exit": None}))
        with (out / "metrics.jsonl").open("ab") as file:
            file.write(b'{"event": "step", "st')
        return out


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for n in range(24):
        (folder / f"{n:02d}.txt").write_text(
            f"{n}. A dark and stormy night. Ünïcode!\n" * 6, "utf-8"
        )
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def shell(
    tmp_path: Path,
    text: Path,
    cache: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Shell:
    monkeypatch.setenv("MINILLM_CACHE", str(cache))
    return Shell(tmp_path, text, capsys)


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    found = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [event for event in found if event["event"] == kind]


def learnt(out: Path) -> list[tuple[Any, ...]]:
    return [
        (e["step"], e["loss"], e["lr"], e["tokens"], e["grad_norm"]) for e in events(out, "step")
    ]


def assert_bit_equal(out: Path, reference: Path) -> None:
    ours, theirs = newest(out), newest(reference)
    assert ours
    assert theirs
    assert ours.step == theirs.step
    arrays, expected = ours.arrays(), theirs.arrays()
    assert arrays.keys() == expected.keys()
    for name, array in expected.items():
        assert arrays[name].tobytes() == array.tobytes(), name
    clock = {"elapsed_seconds"}
    same = {key: value for key, value in theirs.scalars.items() if key not in clock}
    assert {k: v for k, v in ours.scalars.items() if k not in clock} == same
    assert learnt(out) == learnt(reference)
    assert [e["step"] for e in events(out, "step")] == list(range(1, ours.step + 1))
    assert [(e["step"], e["val_loss"]) for e in events(out, "eval")] == [
        (e["step"], e["val_loss"]) for e in events(reference, "eval")
    ]


SETS = [(), ("muon",), ("paired_heads",), ("muon", "paired_heads"), ("noise",)]
SETS += [("best_fit", "length_buckets"), ("eos_align", "fim"), ("length_curriculum",)]
SETS += [("sft", "sparse_loss"), ("ema", "muon"), ("schedule_free",)]
STAGES = "train.stages=[{until=0.3, rows=4, seq_len=5}, {until=0.7, accumulate=3}]"


@pytest.mark.broad(5)
@pytest.mark.parametrize("backend", ["torch", "mlx"])
@pytest.mark.parametrize("names", SETS, ids="+".join)
def test_a_resumed_run_is_bit_equal(shell: Shell, backend: str, names: tuple[str, ...]) -> None:
    plugins: tuple[str, ...] = ()
    if names == ("noise",):
        (shell.folder / "noise.py").write_text(NOISE)
        plugins = ("--plugins", f"{shell.folder / 'noise.py'}:Noise")
    elif names:
        plugins = ("--plugins", ",".join(names))
    if "sft" in names:
        shell.text = shell.folder / "chats.jsonl"
        chats = (
            {"prompt": "So?" * (n % 3), "completion": "Yes. " * (n % 4 + 1)} for n in range(60)
        )
        shell.text.write_text("".join(json.dumps(one) + "\n" for one in chats))
    staged = () if "length_curriculum" in names else (STAGES,)
    assert shell.start("--backend", backend, *plugins, *staged) == 0
    again = plugins if names == ("noise",) else ()
    for step in (3, 6):
        out = shell.killed_at(step, shell.out, f"killed-{step}")
        assert shell("--resume", *again, out=out) == 0
        assert f"resumed after step {step}" in shell.err
        assert_bit_equal(out, shell.out)
    record = json.loads((out / "run.json").read_text())
    (life,) = record["resumed"]
    assert (record["exit"], life["step"], life["exit_before"]) == (0, 6, None)
    assert life["command_before"][:2] == ["minillm", "train"]
    assert record["command"] == ["minillm", "train", "--out", str(out), "--resume", *again]
    assert life["started_before"] <= record["started"] <= record["ended"]


def test_it_starts_at_step_0_where_nothing_was_ever_there(shell: Shell) -> None:
    assert shell.start(out=shell.folder / "reference") == 0
    assert shell.start("--resume") == 0
    assert "there is no run" in shell.err
    assert_bit_equal(shell.out, shell.folder / "reference")

    before_the_first = shell.killed_at(0, shell.out)
    assert shell("--resume", out=before_the_first) == 0
    assert "no checkpoint of the run was ever written: starting at step 0" in shell.err
    assert_bit_equal(before_the_first, shell.out)


def test_checkpoints_of_no_known_run_are_kept_apart(shell: Shell) -> None:
    assert shell.start() == 0
    (shell.out / "run.json").unlink()
    assert shell.start("--resume") == 0
    assert "kept in checkpoints.before-1" in shell.err
    assert len(list((shell.out / "checkpoints.before-1").iterdir())) == 4
    assert [e["step"] for e in events(shell.out, "step")] == list(range(1, STEPS + 1))


def test_a_finished_run_says_so_and_more_steps_extend_it(shell: Shell) -> None:
    assert shell.start() == 0
    before = {path: path.read_bytes() for path in shell.out.rglob("*") if path.is_file()}
    assert shell("--resume") == 0
    assert "is finished: 10 steps are done" in shell.err
    assert before == {path: path.read_bytes() for path in shell.out.rglob("*") if path.is_file()}
    assert shell("--resume", "--steps", "13") == 0
    assert "extended from 10 to 13 steps: every schedule now spreads over 13" in shell.err
    assert [e["step"] for e in events(shell.out, "step")] == list(range(1, 14))
    record = json.loads((shell.out / "run.json").read_text())
    assert record["config"]["train"]["steps"] == {"value": 13, "origin": "--steps"}
    assert record["config"]["train"]["rows"] == {"value": 2, "origin": "command line"}


@pytest.mark.broad(3)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train.lr=0.5"], "train.lr = 0.5, the run has 0.003\n"),
        (["--plugins", "paired_heads"], "differ from the run's: --plugins: + paired_heads\n"),
        (["train.rows=4"], "train.rows = 4, the run has 2\n"),
        (
            ["train.lr=0.5"],
            "leave it out, or start a new run from this one: --branch {out} --out NEW",
        ),
        (["model.layers=3"], "model.layers = 3, the run has 2"),
        (["--seed", "4"], "seed = 4, the run has 0"),
        (["--preset", "small"], "started from preset tiny"),
        (["data.seed=5"], "data.seed = 5, the run has 0"),
        (["data.val=0.2"], "data.val = 0.2, the run has 0.05"),
        (["--init", "nowhere"], "the run was started from new weights, not {nowhere}"),
        (["--steps", "2"], "3 of 10 steps are done already"),
    ],
)
def test_another_run_is_refused_with_the_difference(
    shell: Shell, arguments: list[str], said: str
) -> None:
    assert shell.start() == 0
    out = shell.killed_at(3, shell.out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert shell("--resume", *arguments, out=out) == 2
    assert said.format(out=out, nowhere=Path("nowhere").absolute()) in shell.err
    assert len(shell.err.splitlines()) <= 12
    assert "has changed" not in shell.err
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_other_data_are_refused_by_their_fingerprint(shell: Shell, tmp_path: Path) -> None:
    given, own = shell.text, tmp_path / "text"
    shutil.copytree(given, own)
    shell.text = own
    assert shell.start() == 0
    out = shell.killed_at(3, shell.out)
    (own / "03.txt").write_text("Another night.\n" * 6)
    assert shell("--resume", out=out) == 2
    assert "the data have changed since the run began" in shell.err
    assert shell.err.count("document") > 1, "both texts are named"
    assert shell.err.rstrip().endswith(f"--branch {out} --out NEW --data {own}")
    shutil.rmtree(own)
    shutil.copytree(given, tmp_path / "moved")
    assert shell("--resume", "--data", str(tmp_path / "moved"), out=out) == 0


def test_a_tokenizer_that_was_given_is_the_run_s_own_from_then_on(
    shell: Shell, tmp_path: Path
) -> None:
    assert shell.start() == 0
    given = tmp_path / "given.json"
    shutil.copy(shell.out / "tokenizer.json", given)
    out = tmp_path / "with-it"
    assert shell.start(f"data.tokenizer={given}", out=out) == 0
    given.unlink()
    killed = shell.killed_at(3, out)
    assert shell("--resume", out=killed) == 0
    assert_bit_equal(killed, out)


def test_what_does_not_change_the_plan_may_change(shell: Shell) -> None:
    assert shell.start() == 0
    out = shell.killed_at(6, shell.out)
    changes = ("eval.every=0", "checkpoint.keep=2", "log.every=5", "train.rows=4")
    assert shell("--resume", *changes, "train.accumulate=1", out=out) == 0
    ours, theirs = newest(out), newest(shell.out)
    assert ours
    assert theirs
    assert ours.scalars["cursor"] == theirs.scalars["cursor"]
    for name, array in theirs.arrays("model.").items():
        np.testing.assert_allclose(ours.arrays("model.")[name], array, atol=1e-4)
    assert len(list((out / "checkpoints").iterdir())) == 2


def test_another_backend_is_said(shell: Shell) -> None:
    assert shell.start("--backend", "torch") == 0
    out = shell.killed_at(6, shell.out)
    assert shell("--resume", "--backend", "mlx", out=out) == 0
    assert "the run was on torch cpu and continues on mlx cpu" in shell.err
    assert [e["step"] for e in events(out, "step")] == list(range(1, STEPS + 1))


def test_a_run_that_was_started_with_relative_paths_resumes_from_any_folder(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = shell.text
    monkeypatch.chdir(given.parent)
    shell.text = Path(given.name)
    assert shell.start() == 0
    out = shell.killed_at(6, shell.out)
    monkeypatch.chdir(shell.folder)
    assert shell("--resume", out=out) == 0
    assert_bit_equal(out, shell.out)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_bad_checkpoint_is_set_aside_loudly_and_the_older_one_used(shell: Shell) -> None:
    assert shell.start() == 0
    out = shell.killed_at(6, shell.out)
    flip(out / "checkpoints" / "step-00000006" / "optimizer.safetensors")
    assert shell("--resume", out=out) == 0
    assert "step-00000006.corrupt" in shell.err
    assert "resumed after step 3" in shell.err
    assert_bit_equal(out, shell.out)


def test_all_bad_is_exit_4_now_and_at_every_later_try(shell: Shell) -> None:
    assert shell.start() == 0
    out = shell.killed_at(6, shell.out)
    for path in (out / "checkpoints").iterdir():
        flip(path / "model.safetensors")
    for _ in range(3):
        assert shell("--resume", out=out) == 4
        assert {path.name for path in (out / "checkpoints").iterdir()} == {
            *("step-00000003.corrupt", "step-00000006.corrupt")
        }
    shutil.rmtree(out / "checkpoints")
    assert shell("--resume", out=out) == 0
    assert_bit_equal(out, shell.out)


def test_resume_must_say_which_run(shell: Shell) -> None:
    assert main(["train", "--resume"]) == 2
    assert "does not say which run" in shell.capsys.readouterr().err


def test_single_files_must_be_named_again(shell: Shell) -> None:
    (shell.folder / "noise.py").write_text(NOISE)
    spec = f"{shell.folder / 'noise.py'}:Noise"
    assert shell.start("--plugins", spec) == 0
    out = shell.killed_at(3, shell.out)
    assert shell("--resume", out=out) == 2
    assert "must be named again" in shell.err
    (shell.folder / "noise.py").write_text(NOISE.replace("0.2", "0.1 + 0.1"))
    assert shell("--resume", "--plugins", spec, out=out) == 0
    lines = shell.err.splitlines()
    (told,) = (one for one in lines if "noise.py" in one and not one.startswith("  minillm "))
    place = spec.partition(":")[0]
    assert told == f"warning: the file of plugin noise ({place}) has changed since step 3"
    assert "digests" not in shell.err
    (shell.folder / "noise.py").write_text(NOISE)
    assert shell("--resume", "--plugins", spec, out=shell.killed_at(3, shell.out, "same")) == 0
    assert "has changed" not in shell.err
    (shell.folder / "noise.py").write_text(NOISE + "# edited\n")
    given = ("--plugins", spec, "train.lr=0.5")
    assert shell("--resume", *given, out=shell.killed_at(3, shell.out, "other")) == 2
    assert f"fix:   the file of plugin noise ({place}) has changed since step 3; leave" in shell.err
    assert learnt(out) == learnt(shell.out)


@pytest.mark.parametrize("damage", ["{", "[]", '{"config": {}, "plan_hash": ""}'])
def test_a_record_that_is_none_is_refused(shell: Shell, damage: str) -> None:
    assert shell.start() == 0
    (shell.out / "run.json").write_text(damage)
    assert shell("--resume") == 2
    assert "run.json" in shell.err


def test_the_plan_of_a_run_can_be_shown(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    assert shell.start("--plugins", "muon") == 0
    assert main(["plan", "--resume", "--out", str(shell.out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    record = json.loads((shell.out / "run.json").read_text())
    assert document["plan_hash"] == record["plan_hash"]


@pytest.mark.slow
def test_a_spike_goes_back_further_each_time_and_a_kill_changes_nothing(shell: Shell) -> None:
    (shell.folder / "spike.py").write_text(SPIKE)
    plugin = ("--plugins", f"{shell.folder / 'spike.py'}:Spike")
    spiky = ("train.spike=0.4", "train.rewind=5", "train.skip=3", "train.accumulate=1")
    assert shell.start(*plugin, *spiky, steps=40) == 0
    told = [line for line in shell.err.splitlines() if "has a spike" in line]
    assert len(told) > 1
    assert "the batches of 6 steps are skipped" in told[1]
    went_back = events(shell.out, "rewind")
    assert went_back
    for step in (went_back[0]["to"], went_back[0]["to"] + 3):
        out = shell.killed_at(step, shell.out, f"killed-{step}")
        assert shell("--resume", *plugin, out=out) == 0
        assert_bit_equal(out, shell.out)
        assert events(out, "rewind") == went_back


def test_one_evaluation_that_was_due_is_made_up_for(
    shell: Shell, make_eval_due: Callable[[Path], None]
) -> None:
    assert shell.start("checkpoint.every=4") == 0
    out = shell.killed_at(4, shell.out)
    make_eval_due(out)
    assert shell("--resume", out=out) == 0
    assert_bit_equal(out, shell.out)


@pytest.fixture
def make_eval_due() -> Callable[[Path], None]:
    """Return a function that removes all lines after the save of step 4 from metrics.jsonl, also its evaluation."""

    def cut(out: Path) -> None:
        lines = (out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        first = next(n for n, one in enumerate(lines) if b'"eval", "step": 4,' in one)
        (out / "metrics.jsonl").write_bytes(b"".join(lines[:first]))

    return cut


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory, text: Path, cache: Path) -> Path:
    """Train a run to branch from, which no test writes to."""
    out = tmp_path_factory.mktemp("origin") / "out"
    given = ("--data", str(text), "--preset", "tiny", "--device", "cpu", "--steps", str(STEPS))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MINILLM_CACHE", str(cache))
        assert main(["train", "--out", str(out), *given, *SMALL]) == 0
    return out


def branch(shell: Shell, of: str, *arguments: str, name: str = "branch") -> Path:
    out = shell.folder / name
    assert shell("--branch", of, *arguments, out=out) == 0, shell.err
    return out


def learnt_after(out: Path, step: int) -> list[tuple[Any, ...]]:
    return [one for one in learnt(out) if one[0] > step]


@pytest.mark.broad(1)
@pytest.mark.parametrize(
    "names", [(), ("muon", "paired_heads"), ("noise",)], ids=lambda n: "+".join(n) or "none"
)
def test_a_branch_with_the_same_settings_takes_the_same_steps(
    shell: Shell, names: tuple[str, ...]
) -> None:
    (shell.folder / "noise.py").write_text(NOISE)
    noise = f"{shell.folder / 'noise.py'}:Noise"
    plugins = ("--plugins", noise if names == ("noise",) else ",".join(names)) if names else ()
    again = plugins if names == ("noise",) else ()
    assert shell.start(*plugins) == 0
    out = branch(shell, f"{shell.out}@6", *again)
    ours, theirs = newest(out), newest(shell.out)
    assert ours
    assert theirs
    expected = theirs.arrays()
    assert ours.step == theirs.step == STEPS
    assert {n: a.tobytes() for n, a in ours.arrays().items()} == {
        n: a.tobytes() for n, a in expected.items()
    }
    assert learnt(out) == learnt_after(shell.out, 6)
    record = json.loads((out / "run.json").read_text())
    origin = json.loads((shell.out / "run.json").read_text())
    assert record["branched_from"] == {
        "out": str(shell.out),
        "step": 6,
        "plan_hash": origin["plan_hash"],
    }
    assert record["plan_hash"] == origin["plan_hash"]

    for step in (6, 9):
        killed = shell.killed_at(step, out, f"killed-{step}")
        assert shell("--resume", *again, out=killed) == 0
        assert learnt(killed) == learnt(out)
        found = newest(killed)
        assert found
        assert {n: a.tobytes() for n, a in found.arrays().items()} == {
            n: a.tobytes() for n, a in expected.items()
        }
        assert json.loads((killed / "run.json").read_text())["branched_from"]["step"] == 6


def test_a_branch_may_differ_in_anything_and_says_what_starts_anew(
    shell: Shell, origin: Path
) -> None:
    out = branch(
        shell,
        f"{origin}@6",
        *("--plugins", "muon", "train.lr=0.001", "model.layers=3", "--steps", "14"),
    )
    assert "branched from step 6" in shell.err
    shown = ("plan", "--branch", f"{origin}@6", "--plugins", "muon", "model.layers=3", "--json")
    assert main([*shown, "train.lr=0.001", "--steps", "14"]) == 0
    record = json.loads((out / "run.json").read_text())
    assert json.loads(shell.capsys.readouterr().out)["plan_hash"] == record["plan_hash"]
    assert "newly initialised weights: model.layers.2.attention.k.weight" in shell.err
    assert "newly initialised optimizer state: optimizer." in shell.err
    assert "dropped, because this model has no place for it: optimizer.precondition" in shell.err
    assert [e["step"] for e in events(out, "step")] == list(range(7, 15))
    started = newest(origin)
    assert started
    assert events(out, "step")[0]["lr"] < 0.001  # 7 of 14 steps of the new schedule

    # the weights are unchanged: the first loss of the same model equals that of the old run
    same = branch(shell, f"{origin}@6", "train.lr=0.001", name="same")
    assert events(same, "step")[0]["loss"] == events(origin, "step")[6]["loss"]


def test_a_branch_on_other_text_keeps_the_tokenizer_and_reads_from_the_start(
    shell: Shell, origin: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("Call me Ishmael. Some years ago, never mind how long precisely.\n" * 40)
    out = branch(shell, str(origin), "--data", str(other), "--steps", "13")
    assert "the data or their order changed: they are read from the start" in shell.err
    assert (out / "tokenizer.json").read_bytes() == (origin / "tokenizer.json").read_bytes()
    assert [e["step"] for e in events(out, "step")] == [11, 12, 13]
    assert "13 steps of 64 tokens, 0.08 epochs" in shell.err  # 3 of them, of 2,395 tokens
    assert "\n13 steps, 0.08 epochs" in shell.err
    assert shell("--resume", "--steps", "14", out=out) == 0
    assert "14 steps of 64 tokens, 0.11 epochs" in shell.err
    assert "\n14 steps, 0.11 epochs" in shell.err


def test_a_run_that_starts_from_the_weights_of_another_starts_its_schedules_and_data(
    shell: Shell, origin: Path
) -> None:
    lr = "train.lr=0.001"
    assert shell("--init", f"{origin}@6", "--steps", "8", lr, out=shell.out) == 0, shell.err
    assert f"with the weights of step 6 of {origin}" in shell.err
    assert "newly initialised" not in shell.err
    steps, before = events(shell.out, "step"), events(origin, "step")
    assert [one["step"] for one in steps] == list(range(1, 9))
    assert steps[0]["lr"] / 0.001 == pytest.approx(before[0]["lr"] / 0.003, rel=0.3)  # warm-up
    assert steps[0]["loss"] < before[0]["loss"] - 0.5
    first, started = (
        chosen_or_refuse(shell.out, print, step=0),
        chosen_or_refuse(origin, print, step=6),
    )
    held = {name: a for name, a in started.arrays().items() if name.startswith("model.")}
    assert held
    assert all(np.array_equal(first.arrays()[name], array) for name, array in held.items())
    state = [array for name, array in first.arrays().items() if name.startswith("optimizer.")]
    assert state
    assert not any(array.any() for array in state)
    record = json.loads((shell.out / "run.json").read_text())
    assert record["config"]["init"]["value"] is None
    assert record["branched_from"]["weights_only"] is True

    killed = shell.killed_at(6, shell.out, "killed")
    assert shell("--resume", out=killed) == 0
    assert learnt(killed) == learnt(shell.out)
    shown = next(
        line for line in (killed / "run.toml").read_text().splitlines() if "repeat" in line
    )
    assert f"--init {origin}@6" in shown
    shutil.rmtree(killed / "checkpoints")
    assert shell("--resume", "--steps", "9", out=killed) == 2
    assert f"start a new run: --init {origin}@6" in shell.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--init", "{out}@7", "--out", "{new}"], "one of the steps 10, 9, 6, 3"),
        (["--init", "{out}@x", "--out", "{new}"], "--init RUN@STEP"),
        (["--branch", "{out}@7", "--out", "{new}"], "one of the steps 10, 9, 6, 3"),
        (["--branch", "{out}@x", "--out", "{new}"], "'x' is not a step of a run"),
        (["--branch", "{out}@best", "--out", "{new}"], "marked no checkpoint as its best"),
        (["--branch", "{out}", "--out", "{new}"], "--steps 20, for example"),
        (["--branch", "{new}", "--out", "{new}"], "holds no run"),
        (["--branch", "{out}@6", "--out", "{out}"], "holds a run already"),
        (["--branch", "{out}@6", "--resume", "--out", "{out}"], "--branch starts a new one"),
        (["--branch", "{out}@6", "--init", "d"], "both say where the weights come from"),
        (["--branch", "{out}@6", "--out", "{new}", "--preset", "small"], "preset tiny"),
        (["--branch", "{out}@6", "--out", "{new}", "--plugins", "-muon"], "cannot be taken away"),
        (["--branch", "{out}@6", "--out", "{new}", "model.dim=64"], "no weight"),
        (["--init", "{out}@6", "--out", "{new}", "model.dim=64"], "no weight"),
    ],
)
def test_what_is_no_branch_is_refused_and_nothing_is_written(
    shell: Shell, origin: Path, arguments: list[str], said: str
) -> None:
    new = shell.folder / "new"
    typed = [one.format(out=origin, new=new) for one in arguments]
    writes = said == "holds a run already"  # which a plan does not
    for command in ("train",) if writes else ("plan", "train"):
        assert main([command, *typed]) == 2
        err = shell.capsys.readouterr().err
        assert said in err
        assert len(err.splitlines()) <= 12
    assert not new.exists()


def test_a_branch_without_its_checkpoints_does_not_start_at_step_0(
    shell: Shell, origin: Path
) -> None:
    out = branch(shell, f"{origin}@6")
    shutil.rmtree(out / "checkpoints")
    assert shell("--resume", "--steps", "12", out=out) == 2
    assert "began with another's weights and has no checkpoint" in shell.err
    assert f"--branch {origin}@6 --out NEW" in shell.err


PLUGINS = ("muon", "paired_heads", "zero_init")


@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_the_settings_file_of_a_run_repeats_it(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    monkeypatch.chdir(shell.text.parent)
    (shell.folder / "noise.py").write_text(NOISE)
    noise = f"{shell.folder / 'noise.py'}:Noise"
    given = ("--data", shell.text.name, "--preset", preset, "--device", "cpu", "--seed", "3")
    named = ("--plugins", ",".join((*PLUGINS, noise)), "muon.lr=0.01", "train.betas=[0.8,0.95]")
    assert shell("--steps", "6", *given, *SMALL, *named) == 0

    file = shell.out / "run.toml"
    said = [line for line in file.read_text().splitlines() if line.startswith("#")]
    assert f"minillm train -c run.toml --plugins {noise}" in said[0]
    assert f"--preset {preset}" in said[1]
    monkeypatch.chdir(shell.folder)
    again = shell.folder / "again"
    assert shell("-c", str(file), "--plugins", noise, out=again) == 0, shell.err
    first, second = (json.loads((one / "run.json").read_text()) for one in (shell.out, again))
    assert second["plan_hash"] == first["plan_hash"]
    assert second["config"]["data"]["paths"]["value"] == [str(shell.text)]
    assert learnt(again) == learnt(shell.out)
    assert (again / "run.toml").read_text().splitlines()[4:] == file.read_text().splitlines()[4:]

    assert shell("-c", str(shell.out / "run.json"), out=shell.folder / "third") == 2
    assert "is JSON, not TOML" in shell.err
    assert f"fix:   -c {file}" in shell.err


def test_the_settings_file_of_a_branch_names_what_it_began_with(shell: Shell, origin: Path) -> None:
    out = branch(shell, f"{origin}@6", "train.lr=0.001")
    assert f"minillm train -c run.toml --branch {origin}@6" in (out / "run.toml").read_text()
    again = branch(shell, f"{origin}@6", "-c", str(out / "run.toml"), name="again")
    assert learnt(again) == learnt(out)
