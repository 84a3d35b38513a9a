"""The core without minillm-lab or minillm-kit: what they do is left out, with the pip line that adds it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path

import pytest

import minillm_core.testing
import minillm_kit
from minillm_core.install import installed_version
from minillm_core.plugins import discover, first_party, provided

Program = Callable[..., tuple[int, str, str]]

RUN = (
    *("--preset", "tiny", "--backend", "torch", "--device", "cpu", "--steps", "6"),
    *("model.layers=1", "model.dim=32", "model.heads=2", "model.kv_heads=2", "model.hidden=32"),
    *("model.vocab=300", "train.rows=2", "train.seq_len=16", "eval.tokens=64", "eval.samples=0"),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a text, to work in."""
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a sentence of some words.\n\n" * 200)
    return tmp_path


@pytest.fixture
def without(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the distribution that the test names, and its package."""
    name = request.param

    def others() -> Iterator[Distribution]:
        return (one for one in distributions() if one.metadata["Name"] != name)

    def version(asked: str) -> str | None:
        return None if asked == name else installed_version(asked)

    monkeypatch.setattr(discover, "distributions", others)
    monkeypatch.setattr(first_party, "installed_version", version)
    monkeypatch.setitem(sys.modules, name.replace("-", "_"), None)


without_lab = pytest.mark.parametrize("without", ["minillm-lab"], indirect=True)
without_kit = pytest.mark.parametrize("without", ["minillm-kit"], indirect=True)


@without_lab
@pytest.mark.usefixtures("without")
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


@without_lab
@pytest.mark.usefixtures("without")
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


@without_lab
@pytest.mark.usefixtures("without")
def test_a_run_keeps_no_speed(folder: Path, program: Program) -> None:
    pytest.importorskip("torch")
    code, _, err = program("train", *RUN, "--data", "text.txt", "--out", "run")
    assert (code, "speed of the run" in err) == (0, False)
    assert not (folder / "cache" / "speeds.json").exists()


def test_a_run_ends_well_where_its_speed_cannot_be_kept(
    folder: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    broken = EntryPoint("remember", "minillm_lab.nothing:remember", provided.MEASURED)
    monkeypatch.setattr(provided, "offered", lambda *given: broken)
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


@pytest.mark.parametrize("words", [("new", "my_trick"), ("check", "muon", "--only", "api")])
@without_kit
@pytest.mark.usefixtures("without")
def test_its_commands_say_what_to_install(program: Program, words: tuple[str, ...]) -> None:
    code, out, err = program("plugins", *words)
    assert (code, out) == (2, "")
    assert f"no installed distribution has the command minillm plugins {words[0]}" in err
    assert "fix:   pip install minillm-kit" in err


@without_kit
@pytest.mark.usefixtures("without")
def test_help_lists_the_commands_that_are_there(program: Program) -> None:
    code, out, err = program("plugins", "--help")
    assert (code, err) == (0, "")
    listed = {line.split()[1] for line in out.splitlines() if line.startswith("│ ")}
    assert {"list", "info", "why"} <= listed
    assert not {"new", "check"} & listed


@without_kit
@pytest.mark.usefixtures("without")
def test_the_first_import_path_says_what_to_install() -> None:
    with pytest.raises(ModuleNotFoundError, match="pip install minillm-kit") as refused:
        _ = minillm_core.testing.conformance
    assert refused.value.name == "minillm_kit"


def test_the_first_import_path_leads_to_the_kit() -> None:
    for name in ("conformance", "run_module", "one_step", "numpy_ops", "GEOMETRY"):
        assert getattr(minillm_core.testing, name) is getattr(minillm_kit, name)
    with pytest.raises(AttributeError, match="no attribute 'conformence'"):
        _ = minillm_core.testing.conformence


def test_another_missing_module_is_not_taken_for_the_kit(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'pytest'", name="pytest")

    monkeypatch.setattr(minillm_core.testing, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match="No module named 'pytest'"):
        _ = minillm_core.testing.conformance
