"""A killed and resumed run: a tracker loses no step, and has none twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core import (
    Ended,
    Evaluated,
    Event,
    Guarded,
    Resumed,
    Rewound,
    Sampled,
    Saved,
    Skipped,
    Started,
    Stepped,
    Throughput,
    Unsaved,
)
from minillm_core.train import events as core
from minillm_core.train.metrics import METRICS, Metrics, truncate
from minillm_track.entries import figures, line
from minillm_track.log import KINDS, Log, recorded
from minillm_track.trackio import Trackio
from minillm_track.wandb import WandB

TRACKERS = [name for name in ("tensorboard", "trackio", "wandb") if find_spec(name)]
NAN = float("nan")


class Late:
    """A sink whose entries are stored only when it is closed."""

    forgets = True

    def __init__(self, kept: list[int]) -> None:
        self.kept, self.steps = kept, []

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        self.steps.append(step)

    def line(self, kind: str, step: int, text: str) -> None: ...

    def back(self, step: int, to: int) -> None: ...

    def close(self, code: int) -> None:
        self.kept[:] = self.steps


def stepped(n: int, loss: float = 1.0) -> Stepped:
    return Stepped(n, loss, 0.1, n, Throughput(1.0, 1.0, 1.0), 0.1, None, 7, 1.0, {"z": 0.5})


@settings(max_examples=30)
@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), max_size=4))
def test_what_a_kill_takes_is_told_again(
    tmp_path_factory: pytest.TempPathFactory, every: int, kills: list[tuple[int, int]]
) -> None:
    """Each kill is ``lost`` steps after a checkpoint, ``further`` steps after the previous checkpoint."""
    out = tmp_path_factory.mktemp("run")
    kept: list[int] = []
    at = saved = 0
    for further, lost in [*kills, (0, 0)]:
        log = Log(lambda started, at: Late(kept))
        truncate(out / METRICS, saved)
        events: list[Event] = [Started("h", 99, 1, str(out), {"log": {"every": every}})]
        events += [Resumed(saved, "c")] if saved else []
        last = not lost
        at = saved + further + lost if not last else saved + 5
        events += [stepped(n) for n in range(saved + 1, at + 1)]
        events += [Ended(at, 0, 1.0)] if last else []
        with Metrics(out / METRICS, every=every) as metrics:
            for event in events:
                metrics(event)
                log(event)
        saved += further
    there = [e["step"] for e in truncate(out / METRICS, at) if e["event"] == "step"]
    assert kept == there
    assert len(kept) == len(set(kept))


@pytest.mark.parametrize("loss", [1.5, NAN])
def test_an_event_is_read_as_it_was_told(tmp_path: Path, loss: float) -> None:
    events: list[Event] = [
        stepped(1, loss),
        Evaluated(1, 4.0, None),
        Sampled(1, "def ", "f(x):\n"),
        Saved(1, "c", 0.1),
        Unsaved(2, "disk full"),
        Skipped(2, 3),
        Guarded(2, loss, 1.0, 1),
        Rewound(9, 8.5, 0, 2),
        Resumed(1, "c"),
        Ended(9, 75, 61.4),
    ]
    kinds = {one for one in vars(core).values() if isinstance(one, type) and issubclass(one, Event)}
    assert {type(event) for event in events} == set(KINDS.values()) == kinds - {Event, Started}
    for event in events:
        folder = tmp_path / event.event
        folder.mkdir()
        with Metrics(folder / METRICS) as metrics:
            metrics(Started("h", 9, 1))
            metrics(event)
        (again,) = recorded(str(folder))
        assert (repr(figures(again)), line(again)) == (repr(figures(event)), line(event))


def test_a_run_without_the_file_has_no_past(tmp_path: Path) -> None:
    assert recorded(str(tmp_path)) == []


@pytest.mark.parametrize(("name", "tracker"), [("trackio", Trackio), ("wandb", WandB)])
def test_the_last_run_of_a_tracker_has_every_step(fake, tell, step, name, tracker) -> None:
    runs = fake(name)
    tell(tracker(), *map(step, (1, 2, 3, 4)))
    tell(tracker(), *map(step, (3, 4, 5)), resumed=2)
    tell(tracker(), *map(step, (3, 4, 5)), Ended(5, 0, 1.0), resumed=2)
    numbers = [number for number, row in runs[-1].rows if "train/loss" in row]
    assert numbers == [1, 2, 3, 4, 5]
    assert runs[-1].code == 0
    assert len({run.asked["name"] for run in runs}) == 1


@pytest.mark.parametrize("loss", [1.5, NAN])
@pytest.mark.parametrize("failures", [1, 2, 3])
def test_what_came_before_a_late_opening_is_told_again(
    tmp_path: Path, failures: int, loss: float
) -> None:
    kept: list[int] = []
    left = [OSError("no connection")] * failures

    def open_run(started: Started, at: int) -> Late:
        if left:
            raise left.pop()
        return Late(kept)

    log = Log(open_run)
    with Metrics(tmp_path / METRICS, every=2) as metrics:
        for n in (1, 2, 3, 4):
            metrics(stepped(n))
        started = Started("h", 99, 1, str(tmp_path), {"log": {"every": 2}})
        steps = [stepped(n, loss) for n in (5, 6, 7)]
        for event in (started, Resumed(4, "c"), *steps, Ended(7, 0, 1.0)):
            metrics(event)
            with suppress(OSError):  # as the run, which goes on without a tracker that fails
                log(event)
    assert kept == [1, 2, 4, 6, 7]


def test_trackio_keeps_one_run_and_other_runs_alone(fake, tell, step) -> None:
    runs = fake("trackio")
    tell(Trackio(project="another"), step(1))
    tell(Trackio(), step(1), step(2))
    runs[-1].asked["name"] = "somebody's"
    for _ in range(3):  # killed before its first checkpoint
        tell(Trackio(), step(1), step(2))
    assert [run.asked["project"] for run in runs] == ["another", "minillm", "minillm"]
    assert [len(run.rows) for run in runs] == [1, 2, 2]


KILLER = '''
import os, signal
from pathlib import Path
from pydantic import PrivateAttr
from minillm_core import Plugin, Saved, Started, Stepped

class Zz(Plugin, api=1):
    """Kills the run, once, at the step after it heard of a save; told last, by its name."""

    _out: Path = PrivateAttr()
    _saved: bool = PrivateAttr(default=False)

    def on_event(self, event):
        if isinstance(event, Started):
            self._out = Path(event.out)
        self._saved = self._saved or isinstance(event, Saved)
        if isinstance(event, Stepped) and self._saved and not (self._out / "killed").exists():
            (self._out / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
'''

READ = {
    "tensorboard": """
import sys
from tensorboard.backend.event_processing import plugin_event_accumulator as reading
found = reading.EventAccumulator(sys.argv[1] + "/tensorboard")
found.Reload()
shown = [[entry.step for entry in found.Tensors(tag)] for tag in ("train/loss", "val/loss")]
""",
    "trackio": """
from trackio.sqlite_storage import SQLiteStorage
(name,) = SQLiteStorage.get_runs("minillm")
rows = SQLiteStorage.get_logs("minillm", name)
shown = [[row["step"] for row in rows if tag in row] for tag in ("train/loss", "val/loss")]
""",
    "wandb": """
import struct, sys
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record
(path,) = Path(sys.argv[1], "wandb", "latest-run").glob("*.wandb")
data, at, whole, rows = path.read_bytes(), 7, b"", []
while at + 7 <= len(data):  # LevelDB's log: blocks of 32 KiB, a header of 7 bytes before each part
    if 32768 - at % 32768 < 7:
        at += 32768 - at % 32768
        continue
    length, kind = struct.unpack("<4xHB", data[at : at + 7])
    whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
    if kind in (1, 4):
        record, whole = Record.FromString(whole), b""
        items = {(i.key or "/".join(i.nested_key)): i.value_json for i in record.history.item}
        rows += [items] if items else []
shown = [[int(row["step"]) for row in rows if tag in row] for tag in ("train/loss", "val/loss")]
""",
}


@pytest.mark.slow
@pytest.mark.skipif(not TRACKERS, reason="no tracker is installed")
def test_trackers_show_each_step_of_a_killed_run_once(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(
        "\\n\\n".join(f"the {n} little cats sat on mat {n * n}" for n in range(400))
    )
    (tmp_path / "zz.py").write_text(KILLER)
    variables = os.environ | {
        **{"TRACKIO_DIR": str(tmp_path / "trackio"), "MINILLM_CACHE": str(tmp_path / "cache")},
    }
    out = tmp_path / "out"

    def minillm(*arguments: str) -> int:
        named = ",".join([*TRACKERS, f"{tmp_path / 'zz.py'}:Zz"])
        words = ["train", "--out", str(out), "--plugins", named, *arguments]
        command = [sys.executable, "-m", "minillm_core", *words]
        return subprocess.run(command, env=variables, check=False, cwd=tmp_path).returncode

    sizes = (
        "model.vocab=300",
        "model.dim=32",
        "model.layers=1",
        "train.rows=2",
        "eval.tokens=64",
        "eval.samples=0",
    )
    often = ("train.seq_len=16", "eval.every=2", "checkpoint.every=2", "--steps", "12")
    started = ("--preset", "tiny", "--data", str(tmp_path / "text.txt"), "--device", "cpu")
    assert minillm(*started, *sizes, *often) == -signal.SIGKILL
    assert minillm("--resume") == 0
    logged = [json.loads(one) for one in (out / METRICS).read_text().splitlines()]
    told = [[e["step"] for e in logged if e["event"] == kind] for kind in ("step", "eval")]
    assert told == [list(range(1, 13)), [0, 2, 4, 6, 8, 10, 12]]
    assert "resume" in [e["event"] for e in logged]
    for name in TRACKERS:
        script = READ[name] + "import json; print(json.dumps(shown))"
        command = [sys.executable, "-c", script, str(out)]
        read: Any = subprocess.run(command, env=variables, capture_output=True, text=True)
        assert read.returncode == 0, read.stderr
        assert json.loads(read.stdout.splitlines()[-1]) == told, name
