"""Processes of mlx.launch over its ring: the same training as in one process; a single one is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("mlx.core")

STEPPED = Path(__file__).with_name("stepped.py")


@pytest.mark.slow
def test_two_processes_train_alike(
    processes: Callable[..., str], references: Path, tmp_path: Path
) -> None:
    launch = Path(sys.executable).with_name("mlx.launch")
    out, names = tmp_path / "found.json", "plain,moe,speedrun"  # the last is Muon too
    command = [str(launch), "-n", "2", "--backend", "ring", "--", sys.executable, str(STEPPED)]
    # ranks that wait for each other spin, so that two on one core take a second a step:
    # none trains alone while the other waits
    processes(1, "stepped", "mlx", str(out), "micro", names, "alone", "train.steps=6")
    given = [*command, "mlx", str(out), "micro", names, "alone,off", "train.steps=6"]
    here = {**os.environ, "REFERENCES": str(references)}
    done = subprocess.run(given, capture_output=True, text=True, timeout=900, env=here, check=False)
    assert out.exists(), done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert [*found] == names.split(",")
    for name, met in found.items():
        case = met["off"]
        assert case["same"], f"{name}: the ranks have not the same weights"
        assert case["figures"] < 1e-5, f"{name}: {case['figures']} from one process"


@pytest.mark.slow
def test_a_process_that_does_not_find_the_others_is_refused(tmp_path: Path) -> None:
    command = ["-m", "minillm_core", "train", "--backend", "mlx", "--preset", "tiny"]
    here = {**os.environ, "RANK": "0", "WORLD_SIZE": "2"}
    given = [sys.executable, *command, "--steps", "1", "--out", str(tmp_path / "run")]
    done = subprocess.run(given, capture_output=True, text=True, env=here, check=False)
    assert done.returncode == 2
    assert "2 processes were started, but MLX does not connect them" in done.stderr
    assert "mlx.launch" in done.stderr
    assert not (tmp_path / "run").exists()
