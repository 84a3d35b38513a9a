"""Tests of ``minillm doctor``: a line per finding, one JSON document, exit code 2 where no run is possible."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from minillm_core.backends.detect import InstalledFramework, Machine
from minillm_lab.cli.doctor import render
from minillm_lab.doctor import STATES, Finding, diagnose
from minillm_lab.doctor.frameworks import Examined

Program = Callable[..., tuple[int, str, str]]

WORKS = Examined(
    {"version": "2.13", "cuda": None, "devices": [], "mps": False, "warnings": [], "gpu": None}
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace the installed packages that the doctor finds."""

    def pretend(**examined: Examined) -> None:
        frameworks: dict[str, Any] = {name: InstalledFramework("2.13") for name in examined}
        home = "minillm_lab.doctor"
        monkeypatch.setattr(f"{home}.probe", lambda: Machine(**frameworks))
        monkeypatch.setattr(f"{home}.examine", lambda name, limit: examined[name])

    return pretend


def test_one_document(program: Program, machine: Callable[..., None]) -> None:
    machine(torch=WORKS)
    code, out, err = program("doctor", "--json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert document["can_run"]
    assert document["facts"]["torch"] == dict(WORKS.facts)
    parts = {one["part"]: one for one in document["findings"]}
    for part in ("python", "cpu", "memory", "cache", "nvidia", "torch", "mlx", "plugins", "train"):
        assert parts[part]["state"] in STATES
    assert parts["mlx"]["command"] == "pip install 'minillm-core[mlx]' torch===2.13"


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        ({}, "not installed"),
        ({"torch": Examined(failed="it crashed: SIGSEGV")}, "it crashed: SIGSEGV"),
    ],
)
def test_where_no_run_is_possible(
    program: Program, machine: Callable[..., None], installed: dict, words: str
) -> None:
    machine(**installed)
    code, out, err = program("doctor")
    assert (code, err) == (2, "")
    assert "broken" in out
    assert words in out


def test_a_broken_first_choice_is_said_with_the_other(
    program: Program, machine: Callable[..., None]
) -> None:
    machine(torch=Examined(failed="it crashed: SIGSEGV"), mlx=WORKS)
    code, out, _ = program("doctor")
    assert code == 2
    assert "minillm train --backend mlx" in out


def test_a_command_is_one_line_that_can_be_copied() -> None:
    command = "pip install " + " ".join(f"package-{n}" for n in range(40))
    console = Console(file=io.StringIO(), width=60, color_system=None)
    render([Finding("torch", "warning", "[bold]why[/bold]", command)], console)
    first, second = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert first == "warning  torch  [bold]why[/bold]"
    assert second.strip() == command


def test_a_long_line_is_folded_on_a_terminal_beside_its_part() -> None:
    what = "one of many words " * 9
    for terminal in (True, False):
        console = Console(file=io.StringIO(), width=60, color_system=None, force_terminal=terminal)
        render([Finding("torch", "ok", what)], console)
        first, *more = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert first.startswith("ok       torch  one of")
        assert bool(more) == terminal
        assert all(line.startswith(" " * 16 + "o") or "many" in line for line in more)
        assert not terminal or max(map(len, [first, *more])) <= 60


def test_the_doctor_itself_lacks_a_package() -> None:
    script = (
        "import sys; sys.modules['psutil'] = None; from minillm_core.cli.main import main; "
        "sys.exit(main(['doctor']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "minillm-core needs psutil, which is not installed" in done.stderr
    assert "pip install psutil" in done.stderr


@pytest.mark.slow
def test_this_machine_is_looked_at_and_nothing_is_made(tmp_path: Path) -> None:
    findings, facts = diagnose(tmp_path / "cache")
    assert {one.state for one in findings} <= set(STATES)
    assert set(facts) >= {"nvidia"}
    assert not list(tmp_path.iterdir())
