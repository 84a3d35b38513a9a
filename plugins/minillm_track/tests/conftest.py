"""What the tests of this distribution share: the events of a run, and stand-ins for the packages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from minillm_core import Event, Plugin, Resumed, Started, Stepped, Throughput
from minillm_core.train.metrics import METRICS, Metrics, cut

SETTINGS = {"log": {"every": 1}, "train": {"lr": 0.1, "betas": [0.9, 0.95]}, "init": None}


@pytest.fixture
def step() -> Callable[[int], Stepped]:
    """A step's event, whose loss is 10 - n; what a CPU does not know is None."""

    def make(n: int) -> Stepped:
        speed = Throughput(100.0, 120.0, 90.0)
        return Stepped(n, 10.0 - n, 0.1, 64 * n, speed, 0.5, None, None, 1.5, {"z": 0.25})

    return make


@pytest.fixture
def tell(tmp_path: Path) -> Callable[..., None]:
    """``tell(plugin, *events)``: a run's start, and then the events; ``resumed``: from a step.

    metrics.jsonl is written beside, as by the loop: before the plugin hears of an event.
    """

    def run(plugin: Plugin, *events: Event, resumed: int | None = None, every: int = 1) -> None:
        out = tmp_path / "runs" / "one"
        out.mkdir(parents=True, exist_ok=True)
        settings = SETTINGS | {"log": {"every": every}}
        told: list[Event] = [Started("hash", 9, 1000, str(out), settings)]
        if resumed is not None:
            told.append(Resumed(resumed, f"checkpoints/step-{resumed}"))
        cut(out / METRICS, resumed or 0)
        with Metrics(out / METRICS, every=every) as metrics:
            for event in (*told, *events):
                metrics(event)
                plugin.on_event(event=event)  # type: ignore[attr-defined]

    return run


class FakeRun:
    """A run of wandb's or trackio's: W&B drops what has a number below the last, and so does this."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked, self.rows, self.pending = asked, [], {}
        self.axis: tuple[Any, ...] = ()
        self.code: int | None = None
        self.last = -1

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.axis = (name, step_metric)

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool = True) -> None:
        if step is None:
            assert not commit
            self.pending |= data
            return
        self.rows.append((step, {**self.pending, **data}))
        self.pending = {}

    def finish(self, exit_code: int = 0) -> None:
        self.code = exit_code


class FakeApi:
    """trackio's way to the runs that are there; a project that has none is an error."""

    def __init__(self, runs: list[FakeRun]) -> None:
        self.kept = runs

    def runs(self, project: str) -> list[Any]:
        found = [run for run in self.kept if run.asked["project"] == project]
        if not found:
            raise ValueError(f"Project '{project}' does not exist")
        return [
            SimpleNamespace(name=run.asked["name"], delete=lambda run=run: self.kept.remove(run))
            for run in found
        ]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[FakeRun]]:
    """``fake("wandb")`` puts a stand-in where the package would be; the runs that are opened."""

    def put(name: str) -> list[FakeRun]:
        runs: list[FakeRun] = []

        def init(**asked: Any) -> FakeRun:
            print(f"* {name} says hello")
            runs.append(FakeRun(asked))
            return runs[-1]

        module: Any = ModuleType(name)
        module.init = init
        module.Settings = lambda **given: SimpleNamespace(**given)
        module.Markdown = str
        module.finish = lambda: runs[-1].finish()
        module.Api = lambda: FakeApi(runs)
        monkeypatch.setitem(sys.modules, name, module)
        return runs

    return put
