"""Tests of ``minillm ablate`` through the program: table, JSON document, and reuse of finished runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from minillm_core import build_plan, load
from minillm_core.cli.main import main
from minillm_core.errors import Refusal
from minillm_core.plugins.manager import load as load_plugins
from minillm_core.studies import StopRequest
from minillm_lab.ablate import Request, _shared, ablate, prepare_ablation
from minillm_lab.study import bind
from minillm_lab.variants import one_at_a_time

SMALL = (
    *("model.vocab=300", "model.dim=32", "model.layers=2", "model.heads=2", "model.kv_heads=2"),
    *("model.hidden=32", "train.rows=2", "train.seq_len=16", "eval.tokens=300"),
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"the {n} little cats sat on mat {n * n}" for n in range(400)))
    return path


@pytest.fixture
def given(text: Path, tmp_path: Path) -> tuple[str, ...]:
    where = ("--data", str(text), "--preset", "tiny", "--device", "cpu", "--backend", "torch")
    return (*where, "--out", str(tmp_path / "out"), "--steps", "6", *SMALL)


@pytest.mark.slow
def test_an_ablation_shows_a_table_and_keeps_everything(
    given: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["ablate", "--plugins", "muon", "--seeds", "2", *given]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert "muon" in shown.out
    assert "6 steps" in shown.out
    assert re.search(r"^about \d+:\d\d for the runs at equal tokens", shown.err, re.MULTILINE)
    assert re.search(
        r"^baseline, seed 1, 6 steps  run 4 of 4, \d+:\d\d left$", shown.err, re.MULTILINE
    )
    kept = json.loads((tmp_path / "out" / "ablation.json").read_bytes())
    muon = kept["plugins"]["muon"]
    assert muon["low"] <= muon["effect"] <= muon["high"]
    assert kept["hardware"]["cores"]
    assert kept["versions"]["minillm-muon"]
    by_variant = {run["variant"] for run in kept["runs"]}
    assert by_variant == {"baseline", "+muon"}
    assert all(len(run["curve"]) >= 2 for run in kept["runs"])
    assert main([*command, "--json"]) == 0
    again = capsys.readouterr()
    assert json.loads(again.out)["plugins"] == kept["plugins"]
    assert (
        f"{len(kept['runs'])} finished runs of {tmp_path / 'out' / 'runs'} are used again"
        in again.err
    )
    assert "used again" not in shown.err
    command[2] = "qk_norm"
    assert main(command) == 0
    other = capsys.readouterr().err
    assert "ablation.json will be without muon: the runs stay" in other
    assert (
        "baseline, seed 0, 6 steps  run" not in other
    )  # of muon's distribution or not, it is the same


def losses(result: dict[str, Any]) -> dict[tuple[str, int], float]:
    """Return the final held-out loss of each run at equal tokens."""
    runs = (run for run in result["runs"] if run["steps"] == result["steps"])
    return {(run["variant"], run["seed"]): run["curve"][-1]["val_loss"] for run in runs}


@pytest.mark.slow
def test_runs_of_several_devices_are_those_of_one(
    given: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a plugin whose special tokens are in the text of all runs."""
    command = ["ablate", "--plugins", "muon,fim", "--seeds", "2", *given]
    assert main(command) == 0
    one, two = tmp_path / "out", tmp_path / "two"
    expected = json.loads((one / "ablation.json").read_bytes())

    def on_two(request: Request, **more: Any) -> Any:
        return ablate(replace(request, devices=("cpu", "cpu")), **more)

    monkeypatch.setattr("minillm_lab.ablate.ablate", on_two)
    command[command.index(str(one))] = str(two)
    capsys.readouterr()
    assert main(command) == 0
    shown = capsys.readouterr()
    assert "starting a process on each of cpu, cpu" in shown.err
    assert re.search(r"seed \d, 6 steps  run \d of 6", shown.err)
    found = json.loads((two / "ablation.json").read_bytes())
    ours, others = losses(found), losses(expected)
    assert ours == others
    assert len(ours) == 6
    assert found["plugins"]["muon"]["effect"] == expected["plugins"]["muon"]["effect"]


def test_processes_share_the_device(
    given: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = []

    def opened(request: Request, **more: Any) -> Any:
        pools.append(prepare_ablation(request).open(StopRequest()).pool)
        raise Refusal("enough", where="here", fix="none")

    monkeypatch.setattr("minillm_lab.ablate.ablate", opened)
    for more in ((), ("--processes", "2")):
        assert main(["ablate", "--plugins", "muon", *given, *more]) == 2
    none, pool = pools
    assert none is None
    assert (pool.devices, pool.each) == (("cpu",), 2)
    assert pool.opening == "starting 2 processes on cpu"


def test_compiled_runs_share_a_gpu_by_their_estimated_memory(
    given: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more processes than sets of plugins, and none too many for the memory."""
    found: list[int] = []

    def opened(request: Request, **more: Any) -> Any:
        plan = build_plan(request.prepared.loaded, request.prepared.plugins)
        assert request.prepared.detected is not None
        here = bind(plan, request.prepared.detected)
        binding = replace(here, device="cuda:0", compile=True, dtype="bfloat16")
        estimate = plan.estimate("bfloat16").bytes
        for memory, sets in (
            (80 << 30, 2),
            (80 << 30, 9),
            (int(3.5 * (1.7 * estimate + 2**30)), 9),
        ):
            monkeypatch.setattr("minillm_lab.ablate.gpu_bytes", lambda device, m=memory: m)
            devices, each = _shared(request, binding, sets * [plan]) or ((), 1)
            assert devices == ("cuda:0",)
            found.append(each)
        raise Refusal("enough", where="here", fix="none")

    monkeypatch.setattr("os.cpu_count", lambda: 32)
    monkeypatch.setattr("minillm_lab.ablate.ablate", opened)
    assert main(["ablate", "--plugins", "muon", *given]) == 2
    assert found == [2, 5, 3]


@pytest.mark.parametrize(
    ("more", "minutes", "steps"),
    [((), 0.2, 0), (("--steps", "9"), None, 9), (("--minutes", "0.1"), 0.1, 0)],
)
def test_minutes_of_the_settings_are_the_length_of_each_run(
    given: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: tuple[str, ...],
    minutes: float | None,
    steps: int,
) -> None:
    """As with the recipe of a search by minutes."""
    found = []

    def opened(request: Request, **more: Any) -> Any:
        made = prepare_ablation(request).open(StopRequest())
        found.append((made.minutes, made.steps))
        raise Refusal("enough", where="here", fix="none")

    preset, at = tmp_path / "best.toml", given.index("--steps")
    preset.write_text('preset = "tiny"\n[train]\nminutes = 0.2\n')
    monkeypatch.setattr("minillm_lab.ablate.ablate", opened)
    named = [*given[:at], *given[at + 2 :], "--preset", str(preset)]
    assert main(["ablate", "--plugins", "muon", *named, *more]) == 2
    assert found == [(minutes, steps)]


def test_gpus_that_are_not_there_are_refused(
    given: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ablate", "--plugins", "muon", *given, "--gpus", "2"]) == 2
    said = capsys.readouterr().err
    assert "--gpus 2 needs NVIDIA GPUs: 0 found, on device cpu" in said


@pytest.mark.parametrize("width", [60, 80])
def test_a_terminal_shows_the_time_that_is_left_whole(
    given: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    width: int,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    # updated at once instead of four times a second: a run may end before that
    monkeypatch.setattr(Progress, "update", partialmethod(Progress.update, refresh=True))
    assert main(["ablate", "--plugins", "residual_decay", "--seeds", "1", *given]) == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    bars = [line for line in re.split(r"[\r\n]+", shown) if " % run 2 of 2" in line]
    assert max(map(len, bars)) <= width
    assert re.search(r"^\+residual_decay, .* run 2 of 2, \d+:\d\d left", bars[-1])


@pytest.mark.slow
def test_an_ablation_is_what_training_gives(
    given: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ablate", "--plugins", "muon", "--seeds", "1", *given]) == 0
    kept = json.loads((tmp_path / "out" / "ablation.json").read_bytes())
    run = next(one for one in kept["runs"] if (one["variant"], one["steps"]) == ("+muon", 6))
    command = [*given, "--plugins", "muon"]
    command[command.index("--out") + 1] = str(tmp_path / "trained")
    assert main(["train", *command]) == 0
    lines = (tmp_path / "trained" / "metrics.jsonl").read_text().splitlines()
    evaluated = [json.loads(line) for line in lines if '"eval"' in line]
    assert evaluated[-1]["val_loss"] == run["curve"][-1]["val_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("form", [(), ("--json",)], ids=["table", "json"])
def test_one_whose_runs_all_failed_ends_with_an_error(
    given: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    form: tuple[str, ...],
) -> None:
    command = ["ablate", "--plugins", "muon", "--seeds", "2", *given, *form]
    command[command.index("--steps") + 1] = "60"
    for _ in range(2):  # resumed, it ends with the same result
        assert main([*command, "train.lr=1e30", "train.clip=0"]) == 1
        shown = capsys.readouterr()
        assert "found nothing: no pair of runs finished" in shown.err
        assert re.search(r"^  baseline, 2 runs failed: .*not finite", shown.err, re.MULTILINE)
    if form:
        assert json.loads(shown.out)["plugins"]["muon"]["effect"] is None
    else:
        assert "2 pairs failed" in shown.out
    page = (tmp_path / "out" / "ablation.html").read_text(encoding="utf-8")
    assert "All pairs of runs failed for muon" in page
    assert "not run yet" not in page


def test_the_option_by_which_a_folder_is_another_ablations_is_named(
    given: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["ablate", "--plugins", "muon", "--seeds", "1", *given]
    assert main(command) == 0
    capsys.readouterr()
    assert main([*command, "muon.momentum=0.5"]) == 2
    error = capsys.readouterr().err
    assert "holds the runs of another ablation" in error
    assert re.search(
        r"with-muon-seed\d+-6.json: its muon.momentum is 0.95, this one's 0.5$", error, re.M
    )
    assert main([*command, "train.rows=1"]) == 2
    assert "its train.rows is 2, this one's 1\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--seeds", "2"), "no plugin is to be judged"),
        (("--plugins", "muon", "--seeds", "0"), "1 to 64 seeds"),
        (("--plugins", "polar_express"), "; in an ablation, by --with instead of --plugins"),
        (
            ("--plugins", "key_offset,half_rope", "--with", "xsa"),
            "fix:   add --with half_rope, and leave half_rope out of --plugins, or --leave-one-out\n",
        ),
        (("--plugins", "role_lr"), "minillm plugins info role_lr"),
        (("--plugins", "muon", "--minutes", "0"), "0 minutes"),
        (("--plugins", "muon", "--minutes", "0.1"), "6 steps and 0.1 minutes are both given"),
        (("--plugins", "moun"), "muon"),
        (("--plugins", "muon", "--with", "muon"), "where: --plugins muon --with muon\n"),
        (("--plugins", "tensorboard"), "'tensorboard' watches runs and changes none"),
        (("--plugins", "muon", "--with", "tensorboard"), "--plugins -tensorboard removes"),
    ],
)
def test_what_cannot_be_judged_is_refused_and_leaves_nothing(
    given: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    wrong: tuple[str, ...],
    said: str,
) -> None:
    assert main(["ablate", *wrong, *given]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) <= 12
    assert not (tmp_path / "out").exists()


def test_the_folder_of_a_run_is_refused(
    given: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *given]) == 0
    assert main(["ablate", "--plugins", "muon", *given]) == 2
    assert "holds a run of minillm train" in capsys.readouterr().err


def test_the_folder_of_a_search_is_refused(
    given: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "search.json").write_text("{}")
    assert main(["ablate", "--plugins", "muon", *given]) == 2
    assert "out holds a search\n" in capsys.readouterr().err


def test_a_preset_is_judged_with_what_its_plugins_build_on() -> None:
    loaded = load("cpu")
    plugins = load_plugins(loaded.specs, loaded.config.plugins)
    with pytest.raises(Refusal, match="'key_offset' cannot be judged alone") as refused:
        one_at_a_time(loaded, plugins, tuple(loaded.specs))
    assert refused.value.fix is not None
    assert refused.value.fix.startswith(
        "add --with half_rope, and leave half_rope out of --plugins"
    )
    judged = tuple(name for name in loaded.specs if name != "half_rope")
    assert len(one_at_a_time(loaded, plugins, judged).comparisons) == len(judged)


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (("--plugins", "qk_norm"), ["baseline: muon (without qk_norm, which {} names)"]),
        (
            ("--plugins", "relu2,qk_norm", "--with", "xsa"),
            ["baseline: muon, xsa (without qk_norm, which {} names)"],
        ),
        ((), ["baseline: no plugins (without muon, qk_norm, which {} names)"]),
        (("--plugins", "relu2"), []),
        (("--plugins", "qk_norm", "--leave-one-out"), []),
    ],
)
def test_the_baseline_is_named_where_a_plugin_of_the_settings_is_taken_out_of_it(
    given: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    lines: list[str],
) -> None:
    found: list[str] = []

    def opened(request: Request, **more: Any) -> Any:
        found.extend(prepare_ablation(request).lines)
        raise Refusal("enough", where="here", fix="none")

    settings = tmp_path / "own.toml"
    settings.write_text("[plugins.muon]\n[plugins.qk_norm]\n")
    monkeypatch.setattr("minillm_lab.ablate.ablate", opened)
    assert main(["ablate", "-c", str(settings), *words, *given]) == 2
    shown = [line for line in found if line.startswith("baseline")]
    assert shown == [line.format(settings) for line in lines]


@pytest.mark.parametrize("below", ["", "below"])
def test_a_file_in_the_place_of_the_folder_is_refused(
    given: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], below: str
) -> None:
    file = tmp_path / "file"
    file.write_text("text")
    assert main(["ablate", "--plugins", "muon", *given, "--out", str(file / below)]) == 2
    assert f"{file} is not a folder" in capsys.readouterr().err
    assert file.read_text() == "text"


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
def test_finished_runs_are_not_repeated_after_a_kill(
    given: tuple[str, ...], tmp_path: Path, how: signal.Signals
) -> None:
    runs = tmp_path / "out" / "runs"
    command = ["ablate", "--plugins", "muon,qk_norm", *given]
    command[command.index("--steps") + 1] = "60"
    program = [sys.executable, "-m", "minillm_core"]
    with subprocess.Popen([*program, *command], stderr=subprocess.PIPE, env=os.environ) as first:
        while len(list(runs.glob("*.json"))) < 2 and first.poll() is None:
            time.sleep(0.02)
        first.send_signal(how)
        first.communicate()
    assert first.returncode == {signal.SIGKILL: -9, signal.SIGTERM: 75}[how]
    before = {path.name: path.stat().st_mtime_ns for path in runs.glob("*.json")}
    assert len(before) >= 2
    assert main(command) == 0
    after = {path.name: path.stat().st_mtime_ns for path in runs.glob("*.json")}
    assert before.items() <= after.items()
    assert len(after) >= 9
    assert json.loads((tmp_path / "out" / "ablation.json").read_bytes())["finished"]


def test_runs_begin_with_the_weights_of_a_run(
    text: Path, given: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The result names it, and an ablation without it is another one."""
    run = tmp_path / "run"
    place = ("--data", str(text), "--out", str(run), "--device", "cpu", "--preset", "tiny")
    assert main(["train", *place, *SMALL, "--steps", "30", "eval.samples=0"]) == 0
    lines = (run / "metrics.jsonl").read_text().splitlines()
    *_, trained = (one["val_loss"] for one in map(json.loads, lines) if "val_loss" in one)
    short = ("--steps", "1", "--seeds", "1", "--no-equal-seconds", "train.lr=1e-30")
    command = ["ablate", "--plugins", "qk_norm", *given, *short, "train.weight_decay=0.0"]
    assert main([*command, f"init={run}"]) == 0
    kept = json.loads((tmp_path / "out" / "ablation.json").read_bytes())
    assert kept["begins_with"] == f"{run}@30"
    assert losses(kept)["baseline", 0] == pytest.approx(trained, abs=1e-4)
    capsys.readouterr()
    assert main(command) == 2
    assert "its begins_with is " in capsys.readouterr().err
