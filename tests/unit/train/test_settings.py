"""A config survives run.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minillm_core.config.load import load
from minillm_core.errors import Refusal
from minillm_core.train.settings import config_of, settings


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
