"""The three wheels, in an empty environment, train from another folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def programs(
    repository: Path, wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of programs of a fresh environment that holds the wheels and torch."""
    venv = tmp_path_factory.mktemp("empty") / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    core, *plugins = (wheels[name] for name in ("minillm-core", "minillm-muon", "minillm-modded"))
    install = [venv / "bin" / "python", "-m", "pip", "install", "--quiet"]
    pins = ["--constraint", repository / "constraints.txt"]
    subprocess.run(
        [*install, *pins, f"{core}[torch]", *plugins], check=True, env=clean(), timeout=1200
    )
    return venv / "bin"


def clean(**extra: str | Path) -> dict[str, str]:
    """This process's variables, without those that would lead back to the working tree."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "PYTEST", "MINILLM_")) and name != "VIRTUAL_ENV"
    }
    return kept | {name: str(value) for name, value in extra.items()}


def test_the_wheels_list_and_train(programs: Path, tmp_path: Path) -> None:
    env = clean(XDG_CACHE_HOME=tmp_path / "cache", OMP_NUM_THREADS="2")

    def minillm(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [programs / "minillm", *arguments],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    listed = minillm("plugins", "list", "--json")
    assert listed.returncode == 0, listed.stderr
    assert all(f'"{name}"' in listed.stdout for name in ("muon", "paired_heads"))

    trained = minillm("train", "--plugins", "muon,paired_heads", "--steps", "20")
    assert trained.returncode == 0, trained.stderr
    out = tmp_path / "runs" / "tiny-1"
    run = json.loads((out / "run.json").read_text())
    assert run["exit"] == 0
    assert {plugin["name"]: plugin["distribution"] for plugin in run["plugins"]} == {
        "muon": "minillm-muon",
        "paired_heads": "minillm-modded",
    }
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, 21))
    assert any(event["event"] == "eval" for event in events)
    assert (out / "tokenizer.json").is_file()
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000020"]
