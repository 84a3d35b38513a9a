"""Tests that planning all compatible plugins imports no framework; a page has the costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.environment import RESULTS
from benchmarks.planned import FRAMEWORKS, PLUGINS
from benchmarks.planning import check, measured, process


@pytest.fixture(scope="module")
def round_(repository: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.planned"],
        capture_output=True,
        text=True,
        check=True,
        cwd=repository,
    )
    return json.loads(done.stdout)


def test_planning_many_plugins_imports_no_framework(round_: dict[str, Any]) -> None:
    assert {"torch", "mlx"} <= set(FRAMEWORKS)
    assert round_["frameworks"] == []
    assert round_["plugins"] == len(PLUGINS) == len(set(PLUGINS)) >= 20


def test_the_parts_are_all_of_it(round_: dict[str, Any]) -> None:
    parts = round_["parts_seconds"]
    assert set(parts) == {"imports", "settings", "plugins", "hooks", "hash"}
    together = sum(parts.values()) - parts["imports"]
    assert together == pytest.approx(round_["planning_seconds"])


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"frameworks": ["torch"]}, "imported torch"),
        ({"plugins": 3}, "planned something else"),
        ({"plan_hash": "0"}, "planned something else"),
    ],
)
def test_figures_of_something_else_are_refused(
    round_: dict[str, Any], wrong: dict[str, Any], why: str
) -> None:
    check([round_, round_])
    with pytest.raises(SystemExit, match=why):
        check([round_, round_ | wrong])


def test_the_first_round_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, round_: dict[str, Any]
) -> None:
    given = iter(range(100))

    def started(command: list[str], cache: Path) -> tuple[dict[str, float], str]:
        number = float(next(given))
        return {"process_seconds": number, "process_cpu_seconds": number}, json.dumps(round_)

    monkeypatch.setattr("benchmarks.planning.process", started)
    figures = measured(2)
    assert figures["process"]["process_seconds"]["all"] == [2.0, 4.0]
    assert figures["minillm_plan"]["process_seconds"] == {"median": 4.0, "all": [3.0, 5.0]}
    assert figures["frameworks_imported"] == []


def test_a_process_has_bytecode_of_its_own(tmp_path: Path) -> None:
    code = "import sys; print(sys.pycache_prefix, sys.dont_write_bytecode)"
    seconds, printed = process([sys.executable, "-c", code], tmp_path)
    assert printed.split() == [str(tmp_path), "False"]
    assert set(seconds) == {"process_seconds", "process_cpu_seconds"}


def test_what_is_committed_is_below_its_bound() -> None:
    figures = json.loads((RESULTS / "planning.json").read_text())["figures"]
    assert figures["plugins"] >= 20
    assert figures["frameworks_imported"] == []
    assert figures["planning"]["planning_seconds"]["median"] < figures["below_seconds"] == 0.5
