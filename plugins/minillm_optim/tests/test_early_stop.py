"""Tests of early stopping: its decision, and that a run it ends is complete, resumed or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import minillm_core as minillm
from minillm_core import Evaluated, PluginCodeError, Run, Verdict
from minillm_core.cli.main import main
from minillm_optim.early_stop import EarlyStop

SIZES = {
    **{"model.layers": 1, "model.dim": 16, "model.heads": 2, "model.kv_heads": 2},
    **{"model.hidden": 16, "model.vocab": 300, "train.seq_len": 16, "train.rows": 2},
    **{
        "backend": "torch",
        "device": "cpu",
        "train.steps": 12,
        "train.compile": "off",
        "eval.every": 2,
        "eval.samples": 0,
    },
}
BROKEN = '''
from minillm_core import Plugin, Verdict


class Broken(Plugin, api=1):
    """Returns what is not a verdict."""

    def on_evaluated(self, evaluated):
        return {returned}


class Counts(Plugin, api=1):
    """Counts what it is given."""

    def on_evaluated(self, evaluated, history, model):
        ids = [1, 2, 3, 4]
        (nats,), ((same, hit),) = model.losses([ids]), model.scores([ids])
        logits = model.logits(ids)
        assert (nats.shape, hit.shape, logits.shape) == ((3,), (3,), (4, 300))
        assert abs(nats - same).max() < 1e-3
        steps = [one.step for one in (*history, evaluated)]
        assert steps == sorted({*steps})
        return Verdict({"count": len(history), "first": float(nats[0])})
'''


@pytest.mark.parametrize(
    ("losses", "options", "since"),
    [
        ([5, 4, 3, 2], {}, 0),
        ([5, 4, 4, 4], {"patience": 3}, 2),
        ([5, 4, 4, 4, 4], {"patience": 3}, 3),
        ([5, 4, 6, 3.9, 6, 6], {"patience": 2}, 2),
        ([5, 4.9, 4.8, 4.7], {"patience": 3, "least": 0.5}, 3),
    ],
)
def test_it_waits_for_a_lower_loss(losses: list[float], options: Any, since: int) -> None:
    *history, last = (Evaluated(step, loss, None) for step, loss in enumerate(losses))
    stopper = EarlyStop(**options)
    verdict = stopper.on_evaluated(last, history)
    assert verdict.figures["since"] == since
    assert bool(verdict.stop) == (since >= stopper.patience)


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("\n\n".join(f"{n} is a number, not a word." for n in range(900)))
    return "text.txt"


def run_of(text: str, plugins: str, out: str | None = None, **options: Any) -> Run:
    pytest.importorskip("torch")
    settings = {**SIZES, **{key.replace("__", "."): value for key, value in options.items()}}
    config = minillm.load(preset="tiny", plugins=plugins, data=text, settings=settings)
    return Run(minillm.build_plan(config), out=out)


def lines(out: str) -> list[dict[str, Any]]:
    found = map(json.loads, (Path(out) / "metrics.jsonl").read_text().splitlines())
    keys = ("step", "val_loss", "verdicts", "stop")
    return [{key: one.get(key) for key in keys} for one in found if one["event"] == Evaluated.event]


@pytest.mark.slow
def test_a_run_that_it_ends_is_done(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    never = {"early_stop__least": 9.0, "early_stop__patience": 2}  # two evaluations after the first
    for out in ("whole", "parts"):
        run = run_of(text, "early_stop", out, **never)
        for event in run.steps():
            if out == "parts" and isinstance(event, Evaluated) and event.step == 2:
                break
        if out == "parts":
            run.save()
            run.close()
            run = Run.open(out).train()
        assert run.step == 4
        record = json.loads((Path(out) / "run.json").read_text())
        assert record["exit"] == 0
        assert record["stopped"].startswith("after step 4 by early_stop: no lower loss than")
        assert record["verdicts"]["early_stop.since"] == 2
    assert lines("whole") == lines("parts")
    assert [one["step"] for one in lines("whole")] == [0, 2, 4]
    capsys.readouterr()
    assert main(["train", "--resume", "--out", "whole"]) == 0
    assert "whole is finished: stopped after step 4 by early_stop" in capsys.readouterr().err
    assert main(["train", "--branch", "whole", "--out", "on", "--plugins", "-early_stop"]) == 0
    assert "12 steps" in capsys.readouterr().err


def test_a_kill_before_the_last_checkpoint_stops_at_the_same_step(text: str) -> None:
    run = run_of(text, "early_stop", "killed", early_stop__least=9.0, early_stop__patience=2)
    for event in run.steps():
        if isinstance(event, Evaluated) and event.stop:
            break
    run.save()
    run.close()  # the record has it as ended, not as complete
    assert json.loads(Path("killed/run.json").read_text())["exit"] != 0
    assert Run.open("killed").train().step == 4
    assert json.loads(Path("killed/run.json").read_text())["exit"] == 0


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("3.5", "returned no verdict from on_evaluated after step 0"),
        ("Verdict({'a': float('nan')})", "returned no verdict"),
        ("Verdict({'no name': 1.0})", "returned no verdict"),
        ("1 / 0", "raised in on_evaluated"),
    ],
)
def test_what_is_no_verdict_names_the_plugin(text: str, returned: str, said: str) -> None:
    Path("mine.py").write_text(BROKEN.replace("{returned}", returned))
    with pytest.raises(PluginCodeError, match=said) as found:
        run_of(text, "./mine.py:Broken").train()
    assert "plugin 'mine'" in str(found.value)


def test_the_model_is_asked_about_ids(text: str) -> None:
    Path("mine.py").write_text(BROKEN.replace("{returned}", "None"))
    found = [
        event for event in run_of(text, "./mine.py:Counts").steps() if isinstance(event, Evaluated)
    ]
    counts = [one.verdicts["mine.count"] for one in found]
    assert counts == [*range(len(found))]
    assert {*found[-1].verdicts} == {"mine.count", "mine.first"}
    assert Verdict() == Verdict({}, "")
