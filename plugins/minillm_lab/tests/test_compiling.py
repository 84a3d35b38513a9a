"""Tests of the wait for steps that are compiled: from its first second a line, and later ones with the time."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from minillm_lab.ablation import RunProgress, RunSpec
from minillm_lab.cli.ablate import RemainingTime
from minillm_lab.cli.ablate import _watched as ablation_watched
from minillm_lab.cli.compiling import CompilationWait
from minillm_lab.cli.search import _shown as search_shown
from minillm_lab.paired_runs import Current


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time of all waits, in a list of one."""
    time = [100.0]
    init = CompilationWait.__init__
    monkeypatch.setattr(CompilationWait, "__init__", lambda one: init(one, lambda: time[0]))
    return time


RUN = RunProgress(RunSpec("all", 0, 32), runs=20, left=20.0)


def test_lines_tell_how_many_sets_are_compiled_and_for_how_long(
    now: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with ablation_watched(RemainingTime(), more=False) as (watch, _):
        for seconds, compiling in ((0, 4), (5, 4), (5, 3), (100, 1), (1, 0), (30, 2)):
            now[0] += seconds
            watch(RunProgress(RUN.run, runs=20, left=20.0, compiling=compiling, sets=4), 0.0)
    assert capsys.readouterr().err.splitlines() == [
        "compiling 4 of 4 sets of plugins, 0:00",
        "compiling 3 of 4 sets of plugins, 0:10",
        "compiling 1 of 4 sets of plugins, 1:50",
        "all, seed 0, 32 steps  run 1 of 20",
        "compiling 2 of 4 sets of plugins, 0:00",
    ]


def test_a_terminal_shows_the_time_while_nothing_else_happens(
    now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()
    console = Console(file=shown, width=100, force_terminal=True)
    monkeypatch.setattr("minillm_lab.cli.ablate.Console", lambda **_: console)
    bars: list[Progress] = []
    start = Progress.start
    monkeypatch.setattr(Progress, "start", lambda bar: (bars.append(bar), start(bar)))
    with ablation_watched(RemainingTime(), more=False) as (watch, _):
        watch(RunProgress(RUN.run, runs=20, left=20.0, compiling=4, sets=4), 0.0)
        now[0] += 45
        bars[0].refresh()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    assert re.search(r"compiling 4 of 4 sets of plugins .*0:45", text)


@pytest.mark.parametrize("terminal", [False, True])
def test_so_does_a_search(
    now: list[float],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    given: dict[str, Any] = {"number": 1, "runs": 12, "table": (), "spent": 3.0}
    with search_shown() as (watch, _):
        watch(Current("+muon", "round 1, 6 s", **given, compiling=2), 0.0)
        now[0] += 12
        watch(Current("+muon", "round 1, 6 s", **given, compiling=1), 0.0)
    shown = capsys.readouterr().err
    assert "round 1, 6 s: compiling 1 recipe, 0:12" in shown
