"""Fine-tuning with all defaults: a good model does not become worse, a base model becomes better."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minillm_chat.tuning import tuned
from minillm_core import Run
from minillm_core.cli.main import main

SHAPE = ("model.vocab=512", "model.layers=2", "model.dim=64", "train.seq_len=128", "eval.samples=0")
TASK = ("--task", "sft", "sft.template=plain")


def chat(number: int) -> dict[str, str]:
    return {
        "prompt": f"What comes after {number}?",
        "completion": f"After {number} comes {number + 1}.\n#### {number + 1}",
    }


@pytest.mark.slow
def test_defaults_keep_a_good_model_and_improve_a_base_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    draw, numbers = random.Random(0), list(range(400))
    draw.shuffle(numbers)

    def write(name: str, records: list[dict[str, str]]) -> str:
        (tmp_path / name).write_text("".join(json.dumps(one) + "\n" for one in records))
        return name

    text = [{"text": f"After {n} comes {n + 1}."} for _ in range(8) for n in numbers]
    base = write("base.jsonl", text)
    first, second, held_out = (
        write(f"{name}.jsonl", [chat(n) for n in numbers[at : at + 150]])
        for name, at in (("first", 0), ("second", 150), ("held_out", 300))
    )

    def train(out: str, *words: str) -> str:
        capsys.readouterr()
        assert main(["train", "--out", out, *words]) == 0
        return capsys.readouterr().err

    def loss(out: str) -> float:
        return Run.open(out, plugins=None).evaluate(held_out).val_loss

    train("base", "--data", base, "--preset", "tiny", "--steps", "100", *SHAPE)
    train("good", "--branch", "base", *TASK, "--data", first, "--steps", "300")
    capsys.readouterr()
    for command in ("plan", "train"):
        assert main([command, "--branch", "good", *TASK, "--data", second, "--steps", "299"]) == 2
        assert "is the end of this run already" in capsys.readouterr().err
    told = train("branched", "--branch", "good", *TASK, "--data", second)
    assert "steps after the 300 of the branch: the documents are read 2 times" in told
    assert "rates fall to 0 from 10 % of the branch's" in told
    assert main(["export", "good", "--to", "model"]) == 0
    told = train("started", "--init", "model", "--preset", "tiny", *TASK, "--data", second)
    assert "the documents are read 2 times, since train.steps is not given" in told
    good = loss("good")
    for again in ("branched", "started"):
        assert loss(again) <= good + 0.02
    train("tuned", "--branch", "base", *TASK, "--data", first)
    untrained = train("still", "--branch", "base", *TASK, "--data", first, "--steps", "101")
    assert "rates fall to 0 from 10 %" in untrained
    assert good < loss("tuned") < loss("still") - 1


def test_a_plan_has_the_steps_that_the_tuning_would_take(
    trained: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, data = trained(plugins=None), tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(chat(n)) + "\n" for n in range(40)))
    words = ["--task", "sft", "sft.template=plain", "--data", str(data)]
    for start, first in (("--branch", 2), ("--init", 0)):
        assert main(["plan", start, str(base), *words, "--json"]) == 0
        said = capsys.readouterr()
        found = json.loads(said.out)
        steps, tokens = found["plan"]["train"]["steps"], found["costs"]["train_tokens"]
        assert steps - first == math.ceil(2 * tokens / (4 * 64)) > 2
        assert f"note: {steps - first} steps" in said.err
        assert "note: tokens are estimated here, and counted before a run" in said.err
    assert main(["plan", "--branch", str(base), *words, "--steps", "2"]) == 2
    assert "is the end of this run already" in capsys.readouterr().err
    assert main(["plan", "--branch", str(base), *words[:-1], str(tmp_path / "none.jsonl")]) == 0


@pytest.fixture
def asked() -> Callable[..., Any]:
    """A function that returns the chosen settings, by given settings, branch step, directory and epochs."""

    def ask(
        given: dict[str, Any],
        *,
        branch: int | None = None,
        anew: bool = False,
        init: str | None = None,
        epochs: float | None = 2.0,
        packer: str | None = None,
    ) -> tuple[dict[str, Any], tuple[str, ...]] | None:
        import minillm_core as minillm

        loaded = minillm.load("tiny", plugins=[], settings=given)
        begun: Any = SimpleNamespace(checkpoint=SimpleNamespace(step=branch), weights_only=anew)
        loaded = replace(
            loaded,
            config=loaded.config.model_copy(update={"init": init}),
            branch=None if branch is None else begun,
        )
        prepared: Any = SimpleNamespace(
            loaded=loaded,
            earlier=None,
            request=SimpleNamespace(given=given.get),
        )
        plan: Any = SimpleNamespace(
            sourcing=SimpleNamespace(epochs=epochs),
            tokens_per_step=1000,
            arrangement={"packer": SimpleNamespace(owner=packer)} if packer else {},
        )
        found = tuned(prepared, plan, 12_345)
        if found is None:
            return None
        train = found.config.train
        assert all(found.origins[f"train.{key}"] == "tuning" for key in ("steps",) if not given)
        return train.model_dump(), found.notes

    return ask


def test_steps_are_two_readings_and_rates_a_tenth(asked: Callable[..., Any]) -> None:
    train, notes = asked({}, init="here")
    assert (train["steps"], train["schedule"]) == (25, "cosine")
    assert len(notes) == 1
    assert "the documents are read 2 times, since" in notes[0]
    _, notes = asked({}, init="here", packer="best_fit")
    assert "read 2 times, minus what plugin 'best_fit' pads of the rows, since" in notes[0]
    train, notes = asked({}, branch=1000)
    assert train["steps"] == 1025
    assert (train["schedule"], train["warmup"]) == ("wsd", 0.0)
    # the rate at the branch, as the schedule has it: linear to 0 over the cooldown
    assert (25 / 1025) / train["cooldown"] == pytest.approx(0.1)
    assert len(notes) == 2
    train, _ = asked({}, branch=5)
    assert train["cooldown"] == 1.0
    train, notes = asked({}, branch=1000, anew=True)  # --init RUN
    assert (train["steps"], train["schedule"]) == (25, "cosine")
    assert train["lr"] == pytest.approx(0.1 * asked({}, init="here")[0]["lr"])
    assert "10% of the earlier run's" in notes[-1]


@pytest.mark.parametrize(
    ("given", "more", "expected"),
    [
        ({"train.steps": 40}, {"init": "here"}, None),
        ({"train.minutes": 1.5}, {"init": "here"}, None),
        ({"train.minutes": 1.5}, {"branch": 10}, None),
        ({}, {}, None),  # from scratch: the preset's
        ({}, {"init": "here", "epochs": None}, None),  # text
        ({"train.steps": 40, "train.lr": 1e-3}, {"branch": 10}, None),
        ({"train.lr": 1e-3}, {"branch": 10}, (35, "cosine")),
        ({"train.steps": 40}, {"branch": 10}, (40, "wsd")),
    ],
)
def test_what_is_given_is_not_chosen(
    asked: Callable[..., Any],
    given: dict[str, Any],
    more: dict[str, Any],
    expected: tuple[int, str] | None,
) -> None:
    found = asked(given, **more)
    assert (found and (found[0]["steps"], found[0]["schedule"])) == expected
