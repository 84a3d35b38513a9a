"""Shared fixtures: a run's events, and fakes of the tracker packages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from minillm_core import Event, Plugin, Resumed, Started, Stepped, Throughput
from minillm_core.train.metrics import METRICS, Metrics, truncate

SETTINGS = {"log": {"every": 1}, "train": {"lr": 0.1, "betas": [0.9, 0.95]}, "init": None}


@pytest.fixture
def step() -> Callable[[int], Stepped]:
    """Return a factory of step events with loss 10 - n; values unknown on a CPU are None."""

    def make(n: int) -> Stepped:
        speed = Throughput(100.0, 120.0, 90.0)
        return Stepped(n, 10.0 - n, 0.1, 64 * n, speed, 0.5, None, None, 1.5, {"z": 0.25})

    return make


@pytest.fixture
def tell(tmp_path: Path) -> Callable[..., None]:
    """Return ``tell(plugin, *events)``, which sends a run's start, then the events; ``resumed``: a step.

    As in the training loop, metrics.jsonl is written before the plugin receives an event.
    """

    def run(plugin: Plugin, *events: Event, resumed: int | None = None, every: int = 1) -> None:
        out = tmp_path / "runs" / "one"
        out.mkdir(parents=True, exist_ok=True)
        settings = SETTINGS | {"log": {"every": every}}
        told: list[Event] = [Started("hash", 9, 1000, str(out), settings)]
        if resumed is not None:
            told.append(Resumed(resumed, f"checkpoints/step-{resumed}"))
        truncate(out / METRICS, resumed or 0)
        with Metrics(out / METRICS, every=every) as metrics:
            for event in (*told, *events):
                metrics(event)
                plugin.on_event(event=event)  # type: ignore[attr-defined]

    return run


class FakeRun:
    """A fake run of wandb or trackio that records every row, also those W&B would drop as too early.

    As in W&B, what is logged without a step joins the last row, where it replaces the key's value.
    """

    step = 0

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked, self.rows, self.pending = asked, [], {}
        self.axis: tuple[Any, ...] = ()
        self.code: int | None = None

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.axis = (name, step_metric)

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool = True) -> None:
        if step is None:
            assert not commit
            row = self.rows[-1][1] if self.rows else self.pending
            row.update(data)
            return
        self.rows.append((step, {**self.pending, **data}))
        self.pending = {}

    def finish(self, exit_code: int = 0) -> None:
        self.code = exit_code


class ServedRun(FakeRun):
    """A fake run with W&B's counter, which the server keeps over a resume.

    ``step`` is the row of the next ``log()``; rows of one number are one row, an earlier one is dropped.
    """

    def __init__(self, server: dict[int, dict[str, Any]], asked: dict[str, Any]) -> None:
        super().__init__(asked)
        self.server, self.step = server, max(server, default=-1) + 1

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool = True) -> None:
        number = self.step if step is None else step
        if number >= self.step:
            self.step = number
            self.server.setdefault(number, {}).update(data)


class FakeApi:
    """A fake of trackio's Api to stored runs; a project without runs is an error."""

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
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[FakeRun]]:
    """Return ``fake("wandb")``, which replaces the package by a fake and returns the list of opened runs.

    ``make`` makes a run of the arguments of ``init``.
    """

    def put(name: str, make: Callable[[dict[str, Any]], FakeRun] = FakeRun) -> list[FakeRun]:
        runs: list[FakeRun] = []

        def init(**asked: Any) -> FakeRun:
            print(f"* {name} says hello")
            runs.append(make(asked))
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


@pytest.fixture
def server(fake: Callable[..., list[FakeRun]]) -> dict[int, dict[str, Any]]:
    """Replace wandb by a fake, all of whose runs are one run on a server; return its rows by number."""
    rows: dict[int, dict[str, Any]] = {}
    fake("wandb", partial(ServedRun, rows))
    return rows
