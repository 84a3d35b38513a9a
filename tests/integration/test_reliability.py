"""Tests of killed and damaged runs, concurrent trainers and full disks: short runs of scripts in benchmarks/.

Each runs in a separate process: it forks children, which requires a process without threads. That process is
itself forked from one that has imported what runs import.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from minillm_kit import fresh
from tests.integration.trial import IMPORTED

pytestmark = pytest.mark.full


@pytest.fixture
def tried(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run a script; return the rows of its result."""
    monkeypatch.chdir(repository)

    def run(script: str, *arguments: str) -> list[dict]:
        result = tmp_path / f"{script}.json"
        done = fresh.run(
            *("tests.integration.trial", script, *arguments),
            *("--folder", str(tmp_path), "--json", str(result)),
            environment=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"},
            seconds=1200,
            imported=IMPORTED,
        )
        said = done.stdout[-4000:] + done.stderr[-2000:]
        assert done.code == 0, said
        rows = json.loads(result.read_text())["figures"]["rows"]
        assert rows, said
        return rows

    return run


def total(rows: list[dict], what: str) -> int:
    return sum(row[what] for row in rows)


@pytest.mark.parametrize("each", [16, pytest.param(50, marks=pytest.mark.nightly)])
def test_every_killed_run_ends_bit_equal(tried, each: int) -> None:
    rows = tried("kills", "--train", str(each), "--save", str(each))
    assert total(rows, "tried") == total(rows, "bit_equal") == 2 * each
    assert sum(row["facts"]["kills"] for row in rows) >= 2 * each
    assert {row["what"].partition(",")[0] for row in rows} == {
        "kill -9 in training",
        "kill -9 in a save",
    }


def test_a_rank_that_is_killed_costs_nothing(tried) -> None:
    rows = tried("rank_kills", "--same", "1", "--mixed", "1", "--stopped", "0", "--sizes", "2")
    assert total(rows, "tried") == total(rows, "detected") == 2
    assert total(rows, "bit_equal") == 1
    assert sum(row["facts"]["kills"] for row in rows) >= 2


@pytest.mark.parametrize("sample", [8, pytest.param(1000, marks=pytest.mark.nightly)])
def test_every_plugin_killed_ends_bit_equal(tried, sample: int) -> None:
    """All plugins in one run, and those that need a run of their own: a new sample each time."""
    rows = tried("plugins_killed", "--once", "--sample", str(sample))
    assert total(rows, "tried") == total(rows, "bit_equal") == total(rows, "detected")
    assert all(row["facts"]["plugins"] > (45 if sample == 8 else 60) for row in rows)


def test_every_corruption_is_noticed(tried) -> None:
    rows = tried("corruptions", "--tried", "120")
    assert total(rows, "tried") == total(rows, "detected") == 120
    assert total(rows, "ended") == total(rows, "bit_equal") > 5


def test_one_of_many_trainers_runs(tried) -> None:
    rows = tried("pairs", "--tried", "6")
    assert total(rows, "detected") == total(rows, "bit_equal") == 6


def test_nothing_of_a_hostile_folder_runs_hangs_or_writes(tried) -> None:
    rows = tried("hostile", "--flips", "10")
    assert total(rows, "tried") == total(rows, "detected") > 150


def test_nothing_made_up_crashes_or_runs_code(tried) -> None:
    rows = tried("headers", "--tried", "400")
    assert total(rows, "detected") == 400 * len(rows)
    assert 0 < total(rows, "bit_equal") < total(rows, "detected")


def test_a_full_disk_costs_no_checkpoint(tried) -> None:
    rows = tried("full_disk")
    assert total(rows, "detected") == total(rows, "bit_equal") == 20


def test_every_fault_of_a_plugin_is_contained(tried) -> None:
    rows = tried("faults", "--hang", "14", "--steps", "20")
    assert total(rows, "tried") == total(rows, "detected") == total(rows, "bit_equal") == 103


@pytest.mark.skipif(not find_spec("mlx"), reason="mlx is not installed")
def test_and_where_arrays_are_mlx_s(tried) -> None:
    running = "(on_batch|forward|stage|kernel)-(?!hang|signal).*"
    rows = tried("faults", "--backend", "mlx", "--steps", "20", "--only", running)
    assert total(rows, "tried") == total(rows, "detected") == total(rows, "bit_equal") == 21
