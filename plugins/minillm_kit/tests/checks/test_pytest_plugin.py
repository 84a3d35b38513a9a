"""Tests of the kit's pytest plugin: its output, its flags, and no cost for other projects."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minillm_kit.pytest_plugin import requested

Run = Callable[..., str]

PLUGIN = '''
"""A plugin whose hook asks for what there is not."""

from minillm_core import Plugin


class MyTrick(Plugin, api=1):
    """Wrong."""

    def compute_loss(self, loss, other): ...
'''
TESTS = """
from minillm_kit import conformance

test_contract = conformance("./my_trick.py:MyTrick")


def test_backends(minillm_backend):
    print("on", minillm_backend)
"""
OTHERS = """
import sys


def test_nothing_heavy_was_imported():
    heavy = {"numpy", "torch", "mlx", "pydantic", "rich", "minillm_kit.runner"}
    assert "minillm_kit.pytest_plugin" in sys.modules
    assert not heavy & set(sys.modules)
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run pytest in a folder with these files; return its output."""

    def run_pytest(*arguments: str, code: int, below: str = "", **files: str) -> str:
        folder = tmp_path / below
        folder.mkdir(exist_ok=True)
        (tmp_path / "pytest.ini").write_text("[pytest]\n")  # makes this folder pytest's root
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        found = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert found.returncode == code, found.stdout + found.stderr
        return found.stdout + found.stderr

    return run_pytest


@pytest.mark.broad(1)
@pytest.mark.parametrize("below", ["", "plugin"])
def test_a_test_a_check_and_one_failure_for_one_fault(run: Run, below: str) -> None:
    strict = ("-W", "error", "--strict-markers", "--strict-config")
    files = {"my_trick": PLUGIN, "test_it": TESTS}
    out = run("-rs", *strict, "-k", "contract", code=1, below=below, **files)
    assert "minillm 0" in out
    assert ": ./my_trick.py:MyTrick on torch " in out
    assert "\nloads failed: " in out or "\nplans failed: " in out
    assert out.count(" failed: ") == 1
    assert "  cause: " in out
    assert "not run: needs '" in out
    (again,) = [line for line in out.splitlines() if line.startswith("  again: ")]
    words = shlex.split(again.removeprefix("  again: "))
    assert words[:3] == ["python", "-m", "pytest"]
    alone = run(*words[3:], code=1, below=below)
    assert again in alone
    assert "collected 1 item" in alone


@pytest.mark.slow
def test_flags_say_on_which_backend_and_beside_how_many(run: Run) -> None:
    flags = ("--minillm-backend", "mlx", "--minillm-pairs", "all")
    out = run("-s", "-k", "backends", *flags, code=0, my_trick=PLUGIN, test_it=TESTS)
    assert "on mlx" in out
    assert "on torch" not in out
    assert "a number or 'all', not '-1'" in run("--minillm-pairs", "-1", code=4)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, ("both", 2)),
        ({"--minillm-backend": "mlx"}, ("mlx", 2)),
        ({"--minillm-backend": "both", "--minillm-pairs": 0}, ("both", 0)),
        ({"--minillm-pairs": "all"}, ("both", None)),
    ],
)
def test_flags_take_the_place_of_what_the_test_says(given: Any, found: Any) -> None:
    config: Any = SimpleNamespace(getoption=given.get)
    assert requested(config, "both", 2) == found


def test_other_people_s_runs_notice_nothing(run: Run) -> None:
    out = run("-W", "error", code=0, test_other=OTHERS)
    assert "minillm 0" not in out
