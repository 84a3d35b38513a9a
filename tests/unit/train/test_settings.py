"""Tests that a config survives run.json."""

from __future__ import annotations

import json
import subprocess
import tomllib
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.config.load import Loaded, absolute, load
from minillm_core.errors import ConfigError, Refusal
from minillm_core.train.document import git, remarks, settings_file
from minillm_core.train.settings import config_of, layer_of, settings


@pytest.fixture
def loaded(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text("[train]\nlr = 0.01\n[plugins.muon]\nlr = 0.02\n[plugins.hello]\n")
    return load(
        preset="tiny",
        file=file,
        assignments=["model.dim=64", "muon.origin=[1, 2]"],
        flags={"--steps": 7},
        default_preset=lambda: ("tiny", "test"),
    )


def test_each_value_with_its_origin(loaded) -> None:
    document = settings(loaded)
    assert document["train"]["steps"] == {"value": 7, "origin": "--steps"}
    assert document["train"]["lr"]["value"] == 0.01
    assert "run.toml" in document["train"]["lr"]["origin"]
    assert document["train"]["clip"]["origin"] == "default"
    assert document["model"]["layers"]["origin"] == "preset tiny"
    assert document["preset"]["value"] == "tiny"
    assert document["seed"] == {"value": 0, "origin": "default"}
    muon = document["plugins"]["muon"]
    assert "run.toml" in muon["origin"]
    assert muon["options"]["lr"]["value"] == 0.02
    assert document["plugins"]["hello"]["options"] == {}


def test_there_and_back(loaded) -> None:
    document = json.loads(json.dumps(settings(loaded)))
    assert config_of(document, where="run.json") == loaded.config


@pytest.mark.parametrize(
    "change",
    [
        {"train": None},
        {"train": {"lr": 3}},
        {"model": {}},
        {"plugins": []},
        {"plugins": {"muon": {}}},
        {"unknown": {"value": 1, "origin": "x"}},
        {"seed": {"value": "many", "origin": "x"}},
    ],
)
def test_what_is_not_understood_is_refused(loaded, change: dict) -> None:
    with pytest.raises(Refusal, match="not understood") as error:
        config_of({**settings(loaded), **change}, where="run.json")
    assert "where: run.json" in str(error.value)


def test_a_value_without_its_origin_is_read(loaded) -> None:
    document = settings(loaded)
    del document["train"]["lr"]["origin"]
    found = layer_of(document, where="run.json").settings
    assert found["train.lr"].value == loaded.train.lr


def job_of(loaded: Loaded) -> Any:
    """Build the part of a job that its settings file is written from."""
    return SimpleNamespace(
        loaded=loaded,
        config=loaded.config,
        plugins=[SimpleNamespace(distribution=None, origin=SimpleNamespace(source="./x.py:X"))],
        branch=None,
        started=datetime(2026, 1, 2, tzinfo=UTC),
        plan=SimpleNamespace(hash="0123456789abcdef"),
        trainer=SimpleNamespace(binding=SimpleNamespace(backend="numpy")),
    )


def from_toml(text: str, folder: Path) -> Loaded:
    file = folder / "again.toml"
    file.write_text(text, "utf-8")
    return load(file=file, default_preset=lambda: ("small", "test"))


def test_the_settings_file_holds_them_all(loaded, tmp_path: Path) -> None:
    job = job_of(replace(loaded, command=("minillm", "train", "--data", "a\nb")))
    text = settings_file(job.config, remarks(job, None))
    assert from_toml(text, tmp_path).config == loaded.config
    first, second, third = text.splitlines()[:3]
    assert first.endswith(f"minillm train -c run.toml --plugins {Path('x.py').absolute()}:X")
    assert second == "# command: minillm train --data 'a b'"
    assert third.startswith("# 2026-01-02 00:00 UTC; plan 0123456789ab; python 3.")


def test_a_recipe_without_one_of_its_plugins_is_repeated_without_it(tmp_path: Path) -> None:
    loaded = load(preset="speedrun", plugins="-backout", default_preset=lambda: ("tiny", "test"))
    again = from_toml(settings_file(loaded.config, ()), tmp_path)
    assert "backout" not in again.config.plugins
    assert again.config == loaded.config


def test_a_run_by_the_clock_is_repeated_by_the_clock(tmp_path: Path) -> None:
    loaded = load(
        preset="tiny", assignments=["train.minutes=2"], default_preset=lambda: ("tiny", "test")
    )
    again = from_toml(settings_file(loaded.config, ()), tmp_path).config.train
    assert (again.steps, again.minutes) == (None, 2)


JSON = st.recursive(
    st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text('ab."=', min_size=1), inner)
    ),
    max_leaves=6,
)


@given(options=st.dictionaries(st.sampled_from(["a", "b_1"]), JSON, max_size=2))
def test_every_value_of_an_option_comes_back(options: dict[str, Any]) -> None:
    loaded = load(preset="tiny", plugins="muon", default_preset=lambda: ("tiny", "test"))
    config = loaded.config.model_copy(update={"plugins": {"muon": options}})
    text = settings_file(config, ())
    assert tomllib.loads(text)["plugins"]["muon"] == options


def test_paths_are_seen_from_the_folder_that_they_were_typed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load(
        preset="tiny",
        assignments=["data.val=v.txt", "data.tokenizer=/t.json", "init=d"],
        flags={"--data": ["a.txt", "../b"]},
        default_preset=lambda: ("tiny", "test"),
    )
    config = absolute(loaded.config)
    assert config.data.paths == (f"{tmp_path}/a.txt", f"{tmp_path}/../b")
    assert (config.data.val, config.data.tokenizer) == (f"{tmp_path}/v.txt", "/t.json")
    assert config.init == f"{tmp_path}/d"
    plain = load(preset="tiny", default_preset=lambda: ("tiny", "test"))
    assert absolute(plain.config) == plain.config


def test_run_json_is_no_settings_file(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"config": {}}')
    with pytest.raises(ConfigError, match="is JSON, not TOML") as refused:
        load(file=tmp_path / "run.json", default_preset=lambda: ("tiny", "test"))
    assert refused.value.fix == "-c with a TOML file"


def test_the_commit_of_a_folder_and_no_hook_of_it(tmp_path: Path) -> None:
    assert git(tmp_path) is None

    def run(*words: str) -> None:
        names = ("-c", "user.name=A", "-c", "user.email=a@b.c")
        subprocess.run(
            ["git", "-C", str(tmp_path), *names, *words], check=True, capture_output=True
        )

    run("init", "-q")
    (tmp_path / "a").write_text("1")
    run("add", "a")
    run("commit", "-qm", "first")
    hook = tmp_path / "hook.sh"
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    hook.chmod(0o755)
    run("config", "core.fsmonitor", str(hook))
    found = git(tmp_path)
    assert found
    assert (len(found["commit"]), found["dirty"]) == (40, False)
    (tmp_path / "a").write_text("2")
    assert git(tmp_path) == {**found, "dirty": True}
    assert not (tmp_path / "ran").exists()
