"""Test of a plugin created by the installed program: installed, listed, tested and trained with, offline."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minillm_kit.scaffold import KINDS

pytestmark = pytest.mark.full

Run = Callable[..., str]


@pytest.fixture
def run(environment: Any, tmp_path: Path) -> Run:
    """Run a module in an environment with the wheels of core and kit, and the libraries of this environment."""

    def run_module(*arguments: str | Path, cwd: Path = tmp_path) -> str:
        return environment.run(*arguments, cwd=cwd)

    return run_module


def test_a_new_plugin_is_installed_tested_and_trained_with(run: Run, tmp_path: Path) -> None:
    printed = run("minillm_core", "plugins", "new", "head_gate")
    folder = tmp_path / "minillm-head_gate"
    install, check, train = (line.split() for line in printed.splitlines()[-3:])
    assert install[:3] == ["pip", "install", "-e"]
    # As a wheel: an editable install needs more than hatchling, and -e is pip's responsibility.
    run(*install[:2], "--no-index", "--no-deps", "--no-build-isolation", install[3])
    listed = json.loads(run("minillm_core", "plugins", "list", "--json"))
    (entry,) = [entry for entry in listed if entry["name"] == "head_gate"]
    assert (entry["state"], entry["distribution"]) == ("ok", "minillm-head_gate")
    assert "head_gate.layers" in run("minillm_core", "plugins", "info", "head_gate")
    # The other tests of this template run in test_scaffold.py, and all of a plugin's in the tutorial.
    only = ("--only", "slopes,decodes,resumes", "--json")
    report = json.loads(run("minillm_core", *check[1:], *only))
    verdicts = {one["check"]: one["verdict"] for one in report["checks"]}
    assert set(verdicts.values()) <= {"passed", "not applicable"}
    assert report["backends"] == ["torch", "mlx"]
    assert verdicts["slopes"] == verdicts["decodes"] == verdicts["resumes"] == "passed"
    tested = run("pytest", "-q", "-k", "reference or identity", cwd=folder)
    assert " passed" in tested
    assert ": head_gate on torch " in tested  # the kit's pytest plugin
    run("minillm_core", *train[1:], "--steps", "2", "--out", "out", "model.layers=1")
    (record,) = json.loads((tmp_path / "out" / "run.json").read_text())["plugins"]
    assert (record["distribution"], record["evidence"]["shown"]) == ("minillm-head_gate", True)


def test_every_kind_installs_and_plans(run: Run, tmp_path: Path) -> None:
    names = {f"my_{kind}": kind for kind in KINDS}
    for name, kind in names.items():
        run("minillm_core", "plugins", "new", name, "--kind", kind)
    folders = [f"./minillm-{name}" for name in names]
    run("pip", "install", "--no-index", "--no-deps", "--no-build-isolation", *folders)
    for name in names:
        only = ("--only", "manifest,plans", "--backend", "torch")
        report = json.loads(run("minillm_core", "plugins", "check", name, *only, "--json"))
        assert {one["verdict"] for one in report["checks"]} == {"passed"}, name
