"""Tests that the tables of docs/reliability.md match the result files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from benchmarks.environment import RESULTS
from benchmarks.faults import PLACES
from benchmarks.reliability_page import (
    COST,
    FAULTS,
    PAGE,
    TRIALS,
    faults,
    made_by,
    plugins,
    tables,
)


def test_the_page_shows_the_results() -> None:
    assert PAGE.generated() == PAGE.text(), "python -m benchmarks.reliability_page --write"


def test_every_row_of_every_result_is_there() -> None:
    shown = tables()
    for name in TRIALS:
        figures = json.loads((RESULTS / f"{name}.json").read_text())["figures"]
        assert all(f"| {row['what']} | {row['tried']:,} |" in shown for row in figures["rows"])


def test_what_failed_is_shown(tmp_path: Path) -> None:
    for name in TRIALS:
        shutil.copy(RESULTS / f"{name}.json", tmp_path)
    path = tmp_path / "pairs.json"
    document = json.loads(path.read_text())
    document["figures"]["rows"] = [
        {"what": "pairs", "tried": 1200, "detected": 7, "bit_equal": 5, "ended": 6}
        | {"failed": ["a", "b"], "facts": {}}
    ]
    path.write_text(json.dumps(document))
    assert "| pairs | 1,200 | 7 | 5 of 6 | 2 |" in tables(tmp_path)


def test_the_command_can_be_typed_and_draws_the_same() -> None:
    document = json.loads((RESULTS / "kills.json").read_text())
    document["command"] = ["kills.py", "--train", "3", "--json", "some/where.json", "--commit", "0"]
    document["figures"] |= {"seed": 17, "seconds": 61.4}
    said = made_by(document)
    assert said.startswith("- `python -m benchmarks.kills --train 3 --seed 17`: 61 s on ")


def test_the_cost_is_shown_once_it_is_measured(tmp_path: Path) -> None:
    for name in TRIALS:
        shutil.copy(RESULTS / f"{name}.json", tmp_path)
    one = {
        "bytes": 1_500_000_000,
        "stall_percent_every_1000_steps": 0.0123,
        "median": {"stall_seconds": 0.0482, "save_seconds": 2.5, "load_seconds": 1.25},
    }
    document = json.loads((tmp_path / "kills.json").read_text())
    document["figures"] = {
        **{"preset": "gpt2-124m", "parameters": 124_000_000, "step_seconds": 0.39},
        "savers": {"minillm": one, "dcp.save": one},
    }
    assert "stall" not in tables(tmp_path)
    (tmp_path / f"{COST}.json").write_text(json.dumps(document))
    assert "| minillm | 1,500 | 48.2 | 0.012 | 2.50 | 1.25 |" in tables(tmp_path)
    assert "| `dcp.save` | 1,500 |" in tables(tmp_path)


def test_every_cell_of_the_faults_is_shown() -> None:
    document = json.loads((RESULTS / "faults.json").read_text())
    cells = document["figures"]["cells"]
    assert {cell["place"] for cell in cells} == set(PLACES)
    assert {cell["kind"] for cell in cells} == set(FAULTS)
    finished = {(cell["place"], cell["kind"]) for cell in cells if cell["code"] == 0}
    assert all(place == "on_event" or kind == "hang" for place, kind in finished)
    document["figures"]["cells"] = [
        cells[0]
        | {"place": "stage", "kind": "exit", "code": 0, "version": False, "step": True}
        | {"kept": -1, "mended": 1}
    ]
    assert "0 · phs · -1 · **not mended**" in "\n".join(faults(document))


def test_every_plugin_that_was_killed_is_shown() -> None:
    one = {"options": "", "resumed_from": 8, "equal": True}
    other = {"options": "gains=true", "resumed_from": 4, "equal": False}
    figures = {
        "plugins": {"qk_norm": {"torch": [one, other], "mlx": [one]}},
        "left_out": {"liger": "it runs on cuda alone"},
    }
    lines = plugins({"figures": figures}, "a plugin, killed").splitlines()
    assert lines[2:] == [
        "| `liger` |  |  | it runs on cuda alone |",
        "| `qk_norm` | 1 of 2 · 4 | 1 of 1 · 8 | `gains=true` |",
    ]
