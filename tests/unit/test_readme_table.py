"""Tests that the README's figures match the result files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from benchmarks.environment import RESULTS
from benchmarks.readme_table import FILES, PAGE, table


def test_the_readme_shows_the_results() -> None:
    assert PAGE.generated() == PAGE.text(), "python -m benchmarks.readme_table --write"


def test_every_row_has_every_column() -> None:
    rows = [line for line in table().splitlines() if line.startswith("|")]
    assert len(rows) >= 8
    assert len({row.count("|") for row in rows}) == 1


def test_results_of_two_commits_name_both(tmp_path: Path) -> None:
    for name in FILES:
        document = json.loads((RESULTS / f"{name}.json").read_text())
        digit = "b" if name == "main_job_gpu" else "a"
        document["environment"]["commit"] = digit * 40
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    assert "commit aaaaaaa and bbbbbbb." in table(tmp_path)


def test_what_the_script_of_the_main_job_writes_is_read(tmp_path: Path) -> None:
    for name in FILES:
        shutil.copy(RESULTS / f"{name}.json", tmp_path)
    job = {
        **{"preset": "small", "wall_seconds": 91.4, "tokens_per_second_median": 1234567.8},
        **{"mfu_median": 0.345, "val_loss": 4.321, "peak_bytes": 3 * 2**30},
    }
    path = tmp_path / "main_job_gpu.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"figures": {"jobs": [job]}}))
    row = "| 1,234,568 | MFU 0.34; 91 s in all, validation loss 4.32 |  | 3.0 |"
    assert row in table(tmp_path)
