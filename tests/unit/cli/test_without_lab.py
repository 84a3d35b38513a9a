"""Tests of the core without the laboratory: nothing is measured or stored, and one line names the package."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path

import pytest

from minillm_core.install import installed_version
from minillm_core.plugins import discover, first_party, measured

Program = Callable[..., tuple[int, str, str]]

RUN = (
    *("--preset", "tiny", "--backend", "torch", "--device", "cpu", "--steps", "6"),
    *("model.layers=1", "model.dim=32", "model.heads=2", "model.kv_heads=2", "model.hidden=32"),
    *("model.vocab=300", "train.rows=2", "train.seq_len=16", "eval.tokens=64", "eval.samples=0"),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a folder with a text, as the working folder."""
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a sentence of some words.\n\n" * 200)
    return tmp_path


@pytest.fixture
def without_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the distribution and its package."""

    def others() -> Iterator[Distribution]:
        return (one for one in distributions() if one.metadata["Name"] != "minillm-lab")

    def version(name: str) -> str | None:
        return None if name == "minillm-lab" else installed_version(name)

    monkeypatch.setattr(discover, "distributions", others)
    monkeypatch.setattr(first_party, "installed_version", version)
    monkeypatch.setitem(sys.modules, "minillm_lab", None)


@pytest.mark.usefixtures("without_lab")
def test_a_plan_says_what_keeps_speeds(folder: Path, program: Program) -> None:
    code, out, _ = program("plan", *RUN[:-2], "--data", "text.txt")
    line = (
        "unknown: speeds are kept by minillm-lab, which is not installed: pip install minillm-lab"
    )
    assert code == 0
    assert line in " ".join(out.split())
    costs = json.loads(program("plan", *RUN, "--data", "text.txt", "--json")[1])["costs"]
    assert (costs["seconds"], costs["tokens_per_second"], costs["basis"]) == (None, None, None)
    assert not costs["train_tokens_counted"]


@pytest.mark.usefixtures("without_lab")
def test_info_says_what_shows_worth(folder: Path, program: Program) -> None:
    source = "from minillm_core import Plugin\n\nclass Mine(Plugin, api=1):\n    '''Mine.'''\n"
    (folder / "mine.py").write_text(source)
    line = "measured worth is shown by minillm-lab, which is not installed: pip install minillm-lab"
    code, out, _ = program("plugins", "info", "./mine.py:Mine")
    assert code == 0
    assert f"worth {line}" in " ".join(out.split())
    document = json.loads(program("plugins", "info", "./mine.py:Mine", "--json")[1])
    assert document["cards"] == []
    assert document["cards_refused"].startswith(line)


@pytest.mark.usefixtures("without_lab")
def test_a_run_keeps_no_speed(folder: Path, program: Program) -> None:
    pytest.importorskip("torch")
    code, _, err = program("train", *RUN, "--data", "text.txt", "--out", "run")
    assert (code, "speed of the run" in err) == (0, False)
    assert not (folder / "cache" / "speeds.json").exists()


def test_a_run_ends_well_where_its_speed_cannot_be_kept(
    folder: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    broken = EntryPoint("remember", "minillm_lab.nothing:remember", measured.GROUP)
    monkeypatch.setattr(measured, "offered", lambda *given: broken)
    code, _, err = program("train", *RUN, "--data", "text.txt", "--out", "run")
    assert code == 0
    assert "warning: the speed of the run is not kept: No module named" in err
    assert json.loads((folder / "run" / "run.json").read_text())["exit"] == 0


def test_a_finished_run_lets_a_plan_say_its_time(folder: Path, program: Program) -> None:
    pytest.importorskip("torch")
    assert program("train", *RUN, "--data", "text.txt", "--out", "run")[0] == 0
    text = " ".join(program("plan", *RUN, "--data", "text.txt")[1].split())
    assert "as in a run of" in text
    assert "about" not in text.partition("data ")[2].partition(",")[0]  # its tokens were counted
