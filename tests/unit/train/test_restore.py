"""Tests of untrusted run folders: contents are checked, and no code of them is run."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minillm_core.cli.main import main
from minillm_core.config.load import load
from minillm_core.plan import build_plan
from minillm_core.train.settings import settings

EVIL = """from pathlib import Path
Path(__file__).with_name("ran").touch()
from minillm_core import Plugin


class Evil(Plugin, api=1):
    pass
"""

READERS: dict[str, list[str]] = {
    "eval": ["eval", "o", "--data", "text.txt"],
    "generate": ["generate", "o", "x", "--max-tokens", "3"],
    "report": ["report", "o"],
    "export": ["export", "o", "--to", "model"],
    "resume": ["train", "--resume", "--out", "o"],
    "plan": ["plan", "--resume", "--out", "o"],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the readers' working folder, with a run and some text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    Path("text.txt").write_text("It was a dark and stormy night.\n" * 50)
    Path("o").mkdir()
    return tmp_path


@pytest.fixture(scope="module")
def plain_record() -> dict[str, Any]:
    """Return the record of a run without plugins."""
    loaded = load(preset="tiny", default_preset=lambda: ("tiny", "test"))
    plan = build_plan(loaded.config, ())
    document = {"config": settings(loaded), "plan": plan.data(), "plan_hash": plan.hash}
    return json.loads(json.dumps({**document, "plugins": [], "exit": 0}))


def named(key: str) -> Callable[[dict[str, Any]], None]:
    def change(record: dict[str, Any]) -> None:
        record["config"]["plugins"] = {key: {"origin": "x", "options": {}}}

    return change


def with_entry(key: str) -> Callable[[dict[str, Any]], None]:
    """Add the plugin to the loaded ones, as an installed plugin."""

    def change(record: dict[str, Any]) -> None:
        named(key)(record)
        entry = {"name": key, "distribution": "minillm-x", "version": "1", "source": "x:Evil"}
        record["plugins"] = [entry]

    return change


def as_setting(key: str) -> Callable[[dict[str, Any]], None]:
    """Return the place of settings that are not sections."""

    def change(record: dict[str, Any]) -> None:
        record["config"][key] = {"x": {"value": 1, "origin": "x"}}

    return change


ATTACKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "beside": named("./o/evil.py:Evil"),
    "absolute": named("{here}/o/evil.py:Evil"),
    "upwards": named("o/../o/evil.py:Evil"),
    "entry": with_entry("./o/evil.py:Evil"),
    "no class": named("./o/evil.py"),
    "module": named("o.evil:Evil"),
    "setting": as_setting("./o/evil.py:Evil"),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("reader", READERS)
def test_a_record_cannot_name_code(
    folder: Path,
    plain_record: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    reader: str,
    attack: str,
) -> None:
    record = copy.deepcopy(plain_record)
    record["plan"]["data"] |= {"fields": ["x"], "on_batch": []}  # inconsistent
    ATTACKS[attack](record)
    text = json.dumps(record).replace("{here}", str(folder))
    Path("o/run.json").write_text(text)
    Path("o/evil.py").write_text(EVIL)
    code = main(READERS[reader])
    err = capsys.readouterr().err
    assert not Path("o/ran").exists()
    assert "defect" not in err
    if reader != "report":  # which shows the rest of it, without a sample
        assert code == 2
        assert "run.json" in err


@pytest.mark.parametrize("reader", READERS)
def test_a_plugin_of_a_single_file_is_never_found_by_its_name(
    folder: Path, plain_record: dict[str, Any], reader: str
) -> None:
    record = copy.deepcopy(plain_record)
    named("evil")(record)
    Path("o/run.json").write_text(json.dumps(record))
    for place in (".", "o"):
        Path(place, "evil.py").write_text(EVIL)
    main(READERS[reader])
    assert not Path("ran").exists()
    assert not Path("o/ran").exists()


@pytest.mark.parametrize("name", ["run.json", "ablation.json"])
@pytest.mark.parametrize("kind", ["pipe", "hole", "device", "deep", "NaN", "number", "UTF-16"])
def test_a_page_of_a_file_that_no_run_writes_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    path = Path("o", name)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "hole":
            with path.open("wb") as file:
                file.truncate(10 << 30)
        case "device":
            path.symlink_to("/dev/zero")
        case "deep":
            path.write_text('{"config":' * 100_000)
        case "NaN":
            path.write_text('{"config": NaN, "plan_hash": ""}')
        case "number":
            path.write_text(f'{{"config": {"9" * 400}, "plan_hash": ""}}')
        case "UTF-16":
            path.write_text('{"config": {}, "plan_hash": ""}', "utf-16")
    assert main(["report", "o"]) == 2
    err = capsys.readouterr().err
    assert name in err
    assert "defect" not in err
    assert len(err.splitlines()) < 12
