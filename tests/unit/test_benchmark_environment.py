"""Tests that every result file describes its environment."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

import minillm_core
from benchmarks.environment import environment, write


def test_environment_is_json_and_complete() -> None:
    found = json.loads(json.dumps(environment()))
    assert set(found) == {"date", "commit", "hardware", "versions"}
    assert found["versions"]["minillm-core"] == minillm_core.__version__
    assert found["hardware"]["cores"] >= 1
    assert found["hardware"]["memory_bytes"] > 2**28
    assert found["hardware"]["processor"]
    age = datetime.now(UTC) - datetime.fromisoformat(found["date"])
    assert 0 <= age.total_seconds() < 60


def test_a_given_commit_is_kept() -> None:
    assert environment(commit="0" * 40)["commit"] == "0" * 40


def test_environment_imports_no_framework() -> None:
    script = (
        "import sys, benchmarks.environment as e; e.environment();"
        "print(sorted({'torch', 'mlx', 'numpy'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root
    )
    assert done.stdout.strip() == "[]"


def test_write_puts_figures_beside_their_environment(tmp_path: Path) -> None:
    path = write("example", {"seconds": [0.5, 0.25]}, commit="a" * 40, folder=tmp_path / "new")
    assert path == tmp_path / "new" / "example.json"
    written = json.loads(path.read_text())
    assert list(written) == ["benchmark", "command", "environment", "figures"]
    assert written["figures"] == {"seconds": [0.5, 0.25]}
    assert written["environment"]["commit"] == "a" * 40


def test_a_figure_that_is_not_a_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write("example", {"loss": float("nan")}, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_committed_results_say_where_they_come_from(repository: Path) -> None:
    for path in (repository / "benchmarks" / "results").glob("*.json"):
        document = json.loads(path.read_text())
        assert document["benchmark"] == path.stem
        assert set(document["environment"]) == {"date", "commit", "hardware", "versions"}
        assert document["environment"]["commit"], path
