"""Test of the preset speedrun through the program: trained, resumed by the same command, and timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minillm_core.cli.main import main
from minillm_core.config.presets import plugins_of

SMALL = (
    *("model.vocab=300", "model.dim=32", "model.layers=4", "model.heads=2", "model.kv_heads=2"),
    *("model.hidden=32", "train.rows=2", "train.seq_len=16", "eval.tokens=300", "eval.every=0"),
    "eval.samples=0",
)


@pytest.fixture
def given(tmp_path: Path) -> tuple[str, ...]:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"the {n} little cats sat on mat {n * n}" for n in range(400)))
    where = ("--preset", "speedrun", "--data", str(text), "--device", "cpu", "--backend", "torch")
    return (*where, *SMALL)


@pytest.mark.slow
def test_a_run_goes_on_by_the_command_that_started_it(
    given: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    file = tmp_path / "run.toml"
    file.write_text("[backout]\nstart = 0.4\n")  # removed with the plugin
    command = ["train", *given, "-c", str(file), "--plugins", "-backout", "--out", str(out)]
    assert main([*command, "--steps", "4"]) == 0
    record = json.loads((out / "run.json").read_bytes())
    plugins = record["config"]["plugins"]
    assert set(plugins) == set(plugins_of("speedrun")) - {"backout"}
    assert {one["origin"] for one in plugins.values()} == {"preset speedrun"}
    assert main([*command, "--steps", "6", "--resume"]) == 0
    lines = (out / "metrics.jsonl").read_text().splitlines()
    steps = [one["step"] for one in map(json.loads, lines) if one["event"] == "step"]
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_bench_calls_the_sets_by_what_differs(
    given: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--plugins", "-backout,xsa", "--against", "none", "backout.start=0.4")
    short = ("--steps", "1", "--repeats", "1", "--json")
    assert main(["bench", *given, *asked, *short]) == 0
    sets = json.loads(capsys.readouterr().out)["sets"]
    assert list(sets) == ["speedrun+xsa-backout", "speedrun"]


def test_a_bench_of_the_recipe_against_none_is_against_the_plain_model(
    given: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    short = ("--steps", "1", "--repeats", "1", "--json")
    assert main(["bench", *given, "--against", "none", "backout.start=0.4", *short]) == 0
    sets = json.loads(capsys.readouterr().out)["sets"]
    assert list(sets) == ["speedrun", "plain"]
