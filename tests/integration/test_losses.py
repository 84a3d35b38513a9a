"""Test of the third-party command example: its wheel, with the core's, in a clean environment."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.full


def test_a_command_from_a_wheel_is_listed_and_draws_a_run(
    environment: Any, wheels: dict[str, Path], repository: Path, tmp_path: Path
) -> None:
    assert "losses" not in environment.run("minillm_core", "--help", cwd=tmp_path)
    environment.install(wheels["minillm-losses"])
    page = environment.run("minillm_core", "--help", cwd=tmp_path)
    assert "Draw the training loss of runs" in page
    assert "minillm-losses" in page
    small = ("--steps", "3", "train.rows=2", "eval.tokens=512", "eval.samples=0", "--out", "run")
    environment.run("minillm_core", "train", *small, cwd=tmp_path)
    (line,) = environment.run("minillm_core", "losses", "run", cwd=tmp_path).splitlines()
    first, drawing, last, folder = line.split()
    assert float(first) > float(last)
    assert (len(drawing), folder) == (3, "run")

    tests = shutil.copytree(repository / "examples" / "minillm_losses" / "tests", tmp_path / "t")
    assert " passed" in environment.run("pytest", "-q", "--import-mode=importlib", tests, cwd=tests)
