"""Tests that a forked process behaves like a new Python process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from minillm_kit import fresh

MODULE = """
import json, os, sys
GLOBAL = []

def main(arguments):
    GLOBAL.append(1)
    if arguments == ["raise"]:
        raise ValueError("no")
    if arguments == ["wait"]:
        import time
        time.sleep(60)
    if arguments == ["leave"]:
        sys.exit(3)
    found = {"calls": len(GLOBAL), "argv": sys.argv, "folder": os.getcwd(), "stdin": sys.stdin.read()}
    names = ("HOME", "ADDED", "PYTHONHASHSEED")
    from random import Random
    found |= {"environment": {name: os.environ.get(name) for name in names}, "hash": hash("a")}
    print(json.dumps(found | {"seen": sorted({"json.tool", "numpy"} & set(sys.modules))}))

if __name__ == "__main__":
    main(sys.argv[1:])
"""


@pytest.fixture(params=["forked", "started"])
def run(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., fresh.Ended]:
    """Run the module with arguments."""
    if request.param == "started":
        monkeypatch.setattr(sys, "platform", "elsewhere")
    elif sys.platform != "linux":
        pytest.skip("processes are forked on Linux alone")
    modules, folder = tmp_path / "modules", tmp_path / "folder"
    modules.mkdir()
    folder.mkdir()
    (modules / "asked_module.py").write_text(MODULE)
    (folder / "random.py").write_text("hidden = 1\n")  # tempfile needs the standard library's
    monkeypatch.syspath_prepend(modules)
    monkeypatch.chdir(folder)

    def ask(*arguments: str, seconds: float = 60, **more: str) -> fresh.Ended:
        environment = {**os.environ, "PYTHONPATH": "", "PYTHONHASHSEED": "7", **more}
        environment.pop("HOME")
        return fresh.run(
            "asked_module",
            *arguments,
            environment=environment,
            seconds=seconds,
            imported=("json.tool", "no_such_module"),
        )

    return ask


def test_each_call_is_the_first(run: Callable[..., fresh.Ended], tmp_path: Path) -> None:
    one, two = (run("a", "b", ADDED="x"), run("a", "b", ADDED="x"))
    assert one == two
    assert one.code == 0, one.stderr
    found = json.loads(one.stdout)
    assert found["calls"] == 1
    assert found["argv"][1:] == ["a", "b"]
    assert found["folder"] == str(tmp_path / "folder")
    assert found["stdin"] == ""
    assert found["environment"] == {"HOME": None, "ADDED": "x", "PYTHONHASHSEED": "7"}
    assert "numpy" not in found["seen"]
    other = json.loads(run("a", "b", PYTHONHASHSEED="8").stdout)
    assert other["hash"] != found["hash"]


def test_it_ends_as_python_does(run: Callable[..., fresh.Ended]) -> None:
    assert run("leave").code == 3
    raised = run("raise")
    assert raised.code == 1
    assert raised.stderr.splitlines()[-1] == "ValueError: no"
    with pytest.raises(TimeoutError, match=r"asked_module still ran after 0.5 s"):
        run("wait", seconds=0.5)
    assert run("a").code == 0


def test_what_is_imported_is_there(run: Callable[..., fresh.Ended]) -> None:
    """Only where processes are forked: otherwise the module imports what it needs."""
    seen = json.loads(run("a").stdout)["seen"]
    assert seen == (["json.tool"] if sys.platform == "linux" else [])
