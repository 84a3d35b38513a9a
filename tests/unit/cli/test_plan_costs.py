"""Tests of a planned run's costs on this machine: time, epochs of the data, disk; the plan excludes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from minillm_core.cli.planning import bytes_a_token, rough_duration
from minillm_core.config.load import load
from minillm_core.plan import build_plan
from minillm_lab import speeds
from minillm_lab.speeds import Expected

Program = Callable[..., tuple[int, str, str]]

TINY = ("--preset", "tiny", "--device", "cpu", "train.steps=100")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path / "cache"


def test_what_is_not_known_is_said_and_how_it_is_measured(
    own_cache: Path, tmp_path: Path, program: Program
) -> None:
    (tmp_path / "a.txt").write_text("words " * 100_000)
    code, out, _ = program("plan", *TINY, "--data", str(tmp_path / "a.txt"), "model.vocab=4096")
    lines = out.splitlines()
    assert code == 0
    assert max(map(len, lines)) <= 80
    text = " ".join(out.split())
    assert "time unknown here: minillm bench measures it, and so does a finished run" in text
    assert "data about 178 k tokens to train on, about 1.1 epochs" in text
    assert "disk 55.5 MiB a checkpoint, 3 kept: 222.1 MiB at most; token cache about" in text
    assert not own_cache.exists()


def test_a_measured_speed_and_a_counted_corpus_are_used(
    own_cache: Path, tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("words")
    before = json.loads(program("plan", *TINY, "--json")[1])
    fast = Expected(2048.0, "as in a run of 2026-01-02 here")
    monkeypatch.setattr("minillm_lab.speeds.expected", lambda *a: fast)
    monkeypatch.setattr("minillm_lab.speeds.known_tokens", lambda *a: 20_480)
    told = (*TINY, "--data", str(tmp_path / "a.txt"))
    text = " ".join(program("plan", *told)[1].split())
    assert "about 1.7 minutes of training at 2,048 tokens/s, as in a run of 2026-01-02" in text
    assert "data 20.5 k tokens to train on, 10 epochs" in text
    after = json.loads(program("plan", *TINY, "--json")[1])
    costs = after["costs"]
    assert (costs["seconds"], costs["epochs"], costs["train_tokens_counted"]) == (100, 10, True)
    assert before.pop("costs") != after.pop("costs")
    assert before == after  # the plan, its hash, and everything else


def test_a_run_by_the_clock_has_as_many_steps_as_fit(
    own_cache: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minillm_lab.speeds.expected", lambda *a: Expected(2048.0, "so"))
    costs = json.loads(program("plan", *TINY[:-1], "train.minutes=0.5", "--json")[1])["costs"]
    assert (costs["steps"], costs["seconds"]) == (30, 30)


def test_data_that_are_not_there_do_not_stop_a_plan(own_cache: Path, program: Program) -> None:
    for path, named in [("/no.txt", "/no.txt"), ("/a:2", "/a (:2 was read as its weight)")]:
        code, out, _ = program("plan", *TINY, "--data", path)
        assert code == 0
        text = " ".join(out.split())
        assert f"data unknown: there is no such file or folder: {named}" in text


def test_no_checkpoints_take_no_disk(own_cache: Path, program: Program) -> None:
    out = " ".join(program("plan", *TINY, "checkpoint.every=0")[1].split())
    assert "disk no checkpoints; token cache" in out
    assert json.loads(program("plan", *TINY, "checkpoint.every=0", "--json")[1])["costs"][
        "disk_bytes"
    ] == 0  # fmt: skip


@pytest.mark.parametrize(("vocab", "said"), [(16_384, True), (4_096, False)])
def test_most_parameters_in_the_vocabulary_are_worth_a_word(
    own_cache: Path, program: Program, vocab: int, said: bool
) -> None:
    err = program("plan", *TINY, f"model.vocab={vocab}")[2]
    assert ("the embedding and the head hold 75% of the parameters" in err) == said
    tied = program("plan", *TINY, "model.vocab=65536", "model.tied=true")[2]
    assert "the embedding holds 86% of the parameters: a smaller model.vocab" in tied


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.3, "a second"), (40, "40 seconds"), (192, "3.2 minutes"), (9000, "2.5 hours"),
     (86_400 * 4, "4 days"), (86_400 * 1234, "1,234 days")],
)  # fmt: skip
def test_times_are_spoken_to_two_digits(seconds: float, text: str) -> None:
    assert rough_duration(seconds) == text


def test_bytes_a_token_are_near_those_of_the_standard_library() -> None:
    for vocab, counted in ((1024, 2.62), (4096, 3.25), (16_384, 4.0)):
        assert bytes_a_token(vocab) == pytest.approx(counted, rel=0.1)
    assert bytes_a_token(2) == 1.0


def test_a_checkpoint_holds_masters_and_the_state_of_the_rules() -> None:
    plan = build_plan(load(preset="tiny", default_preset=lambda: ("tiny", "")).config, [])
    assert plan.estimate().checkpoint_bytes == 12 * plan.num_parameters
    assert speeds.FILE == "speeds.json"


def test_what_several_gpus_cost_is_brought_by_a_distribution(
    own_cache: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(
        "minillm_core.plugins.provided.offered", lambda *given: asked.append(given[:2])
    )
    code, out, said = program("plan", *TINY, "--gpus", "2")
    assert (code, out, asked) == (2, "", [("minillm.forecasts", "torch")])
    assert "a forecast for several GPUs on torch needs a distribution that is not installed" in said
    assert re.search("pip install .*minillm-mesh", said)
    assert program("plan", *TINY)[0] == 0  # without --gpus none is searched
