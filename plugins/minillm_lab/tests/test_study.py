"""Tests of runs that share a corpus and a compiled step: each gives the results of a run alone."""

from __future__ import annotations

import gc
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minillm_core import (
    ConfigError,
    Evaluated,
    Interrupted,
    MinillmError,
    NoEvidence,
    Plan,
    PlanError,
    Run,
    build_plan,
    load,
)
from minillm_core.backends.bind import create_backend
from minillm_core.backends.detect import Detected
from minillm_core.studies import METRICS, StopRequest, read_events
from minillm_lab.study import Study, Trained, at_pace, bind, open_corpus

DETECTED = Detected("torch", "cpu", "the test says so")
SMALL = {
    **{"model.layers": 2, "model.dim": 32, "model.heads": 2, "model.kv_heads": 2},
    **{"model.hidden": 32, "model.vocab": 300, "train.rows": 2, "train.seq_len": 16},
    **{"train.steps": 4, "eval.tokens": 300, "backend": "torch", "device": "cpu"},
}


@pytest.fixture
def planned(tmp_path: Path) -> Callable[..., Plan]:
    """Return ``planned("muon", **{"train.lr": 0.1})``, on a separate text."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"the {n} little cats sat on mat {n * n}" for n in range(200)))

    def plan(plugins: str = "", **settings: Any) -> Plan:
        return build_plan(load("tiny", plugins=plugins, data=text, settings=SMALL | settings))

    return plan


@pytest.fixture
def study(tmp_path: Path, planned: Callable[..., Plan]) -> Any:
    """Build a study, and the list of plans for which it built trainers."""
    pytest.importorskip("torch")
    made: list[Plan] = []

    def noted(detected: Detected, plan: Plan) -> Any:
        made.append(plan)
        return create_backend(detected, plan)

    corpus = open_corpus(planned().config, cache=tmp_path / "cache")
    return Study(corpus, DETECTED, create=noted), made


def losses(trained: Trained) -> list[float]:
    return [point.val_loss for point in trained.curve]


def test_a_run_of_a_study_is_the_run_of_train(
    study: Any, planned: Callable[..., Plan], tmp_path: Path
) -> None:
    trained = study[0].train(planned(seed=3), 3, evaluations=2)
    assert [point.step for point in trained.curve] == [2, 4]
    assert trained.tokens == 4 * 2 * 16
    run = Run(planned(seed=3, **{"eval.every": 0}), cache=tmp_path / "cache")
    (last,) = (one for one in run.steps() if isinstance(one, Evaluated))
    assert last.val_loss == trained.val_loss


@pytest.mark.slow
def test_plans_of_one_graph_share_a_trainer_and_learn_as_alone(
    study: Any, planned: Callable[..., Plan]
) -> None:
    one, made = study
    plans = planned(), planned(**{"train.lr": 0.1}), planned()
    first, other, again = (one.train(plan, 0) for plan in plans)
    assert len(made) == 1
    assert losses(first) == losses(again) != losses(other)
    one.train(planned(**{"train.rows": 3}), 0)
    assert len(made) == 2
    assert losses(one.train(plans[1], 0)) == losses(other)  # a newly built trainer


@pytest.mark.slow
def test_a_run_by_pace_has_the_steps_that_fit_and_learns_as_one_of_so_many_steps(
    study: Any, planned: Callable[..., Plan]
) -> None:
    one, made = study
    by_clock = planned().with_train(steps=None, minutes=1.0)
    assert 0.0 < one.pace(by_clock) < 10.0
    assert 0.0 < one.pace(by_clock) < 10.0  # with the trainer that it has by now
    plan = at_pace(by_clock, 15.0)
    assert (plan.config.train.steps, plan.config.train.minutes) == (4, None)
    found, timed = one.train(plan, 0), one.train(planned(), 0)
    assert losses(found) == losses(timed)
    assert len(made) == 1
    paced = found.at_pace(15.0)
    assert (paced.seconds, paced.tokens_per_second) == (60.0, 4 * 2 * 16 / 60)
    assert [point.seconds for point in paced.curve] == [15.0 * point.step for point in found.curve]


COUNTING = """
from minillm_core import Plugin, Verdict

class Counting(Plugin, api=1):
    def on_evaluated(self, evaluated, history):
        return Verdict({"evaluations": len(history) + 1})
"""


def test_figures_of_a_plugin_are_in_the_curves_of_a_study(
    study: Any, planned: Callable[..., Plan], tmp_path: Path
) -> None:
    (tmp_path / "counting.py").write_text(COUNTING)
    found = study[0].train(planned(f"{tmp_path}/counting.py:Counting"), 0, evaluations=2)
    assert [dict(point.verdicts) for point in found.curve] == [
        {"counting.evaluations": 1.0},
        {"counting.evaluations": 2.0},
    ]
    assert Trained.of(json.loads(json.dumps(found.data()))) == found  # as ablate keeps and shows it


def test_a_run_that_fails_takes_its_trainer_with_it(
    study: Any, planned: Callable[..., Plan]
) -> None:
    one, made = study

    def fail(progress: float) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        one.train(planned(), 0, watch=fail)
    one.train(planned(), 0)
    assert len(made) == 2


def test_steps_by_hand_take_the_batches_of_training(
    study: Any, planned: Callable[..., Plan]
) -> None:
    with study[0].stepper(planned()) as stepper:
        timed = stepper.run(2)
        micro, values, supervised = stepper.arguments()
        stepper.trainer.read(stepper.trainer.step(micro, values, supervised))
    assert timed.real == 2 * supervised == 2 * micro[0]["ids"].size
    assert 0 <= timed.waited < timed.seconds
    assert values["train.lr"] > 0


@pytest.mark.parametrize(
    "settings", [{"mesh.shard": "updates"}, {"mesh.context": 2}, {"mesh.tensor": 2}]
)
def test_settings_of_several_processes_are_refused(
    planned: Callable[..., Plan], settings: dict[str, Any]
) -> None:
    with pytest.raises(MinillmError, match=r"one process trains|there is only one"):
        bind(planned(**settings), DETECTED)


def test_a_plan_that_cannot_be_trained_is_refused(study: Any, planned: Callable[..., Plan]) -> None:
    plan = planned()
    with pytest.raises(ConfigError, match="how long to train"):
        study[0].train(plan.with_train(steps=None, minutes=None), 0)
    for use in (study[0].stepper, lambda plan: study[0].train(plan, 0)):
        with pytest.raises(PlanError, match="does not hold the settings"):
            use(replace(plan, settings=None))


def test_a_run_by_the_clock_ends_when_its_time_is_over(
    study: Any, planned: Callable[..., Plan]
) -> None:
    seen: list[float] = []
    plan = planned().with_train(steps=None, minutes=0.4 / 60)
    trained = study[0].train(plan, 0, watch=seen.append)
    assert [point.step for point in trained.curve] == [trained.steps]  # evaluated once, at the end
    assert trained.seconds == pytest.approx(0.4, rel=0.5)
    assert seen == sorted(seen)
    assert 0.5 < seen[-1] <= 1


FAILS = """
from minillm_core import Plugin


class Fails(Plugin, api=1):
    '''Raises at every event.'''

    def on_event(self, event):
        raise ValueError("no")
"""


def test_a_plugin_that_took_no_part_ends_a_run_with_a_word_about_it_alone(
    study: Any, planned: Callable[..., Plan], tmp_path: Path
) -> None:
    file = tmp_path / "fails.py"
    file.write_text(FAILS)
    said: list[str] = []
    plan = planned(f"{file}:Fails", **{"train.steps": 12})
    corpus = open_corpus(plan.config, cache=tmp_path / "cache", plans=[plan])
    with pytest.raises(NoEvidence, match="its on_event raised 3 times and was switched off"):
        Study(corpus, DETECTED, say=said.append).train(plan, 0)
    assert len(said) == 4
    assert all(line.startswith("warning: plugin 'fails' ") for line in said)


def test_a_turn_begins_when_all_is_compiled_and_ends_with_the_run(
    study: Any, planned: Callable[..., Plan]
) -> None:
    one, made = study
    log: list[str] = []

    @contextmanager
    def turn() -> Iterator[None]:
        log.append(f"begins after {len(made)}")
        yield
        log.append(f"ends, the collector on: {gc.isenabled()}")

    def watch(progress: float) -> None:
        assert not gc.isenabled()
        log.append(f"{progress:g}")

    one._turn = turn
    one.train(planned(), 0, watch=watch)
    steps = ["0.25", "0.5", "0.75", "1"]
    assert log == ["begins after 1", *steps, "ends, the collector on: True"]
    assert gc.isenabled()


def test_a_request_to_stop_ends_the_run_after_its_step(
    planned: Callable[..., Plan], tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    plan, stop, seen = planned(), StopRequest(), []
    corpus = open_corpus(plan.config, cache=tmp_path / "cache", plans=[plan])

    def watch(progress: float) -> None:
        seen.append(progress)
        stop.signal = signal.SIGTERM

    with pytest.raises(Interrupted, match="SIGTERM after step"):
        Study(corpus, DETECTED, stop=stop).train(plan, 0, watch=watch)
    assert 0 < seen[-1] < 1
    assert gc.isenabled()


def test_events_are_read_up_to_a_torn_line(tmp_path: Path) -> None:
    assert not [*read_events(tmp_path)]
    event = {"event": "step", "step": 1}
    (tmp_path / METRICS).write_text(f'{json.dumps(event)}\n{{"event": "st')
    assert [*read_events(tmp_path)] == [event, None]
