"""The loop: what it does in which order, how it ends, and what it tells."""

from __future__ import annotations

import math
import signal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core.errors import (
    ConfigError,
    DataError,
    Interrupted,
    NonFinite,
    Stopped,
)
from minillm_core.train.budget import Budget, Cadence
from minillm_core.train.events import Ended, Evaluated, Event, Saved, Skipped, Stepped
from minillm_core.train.loop import EMPTY_IN_A_ROW, Loop, Position
from minillm_core.train.signals import StopRequest, stop_on_signals


class Run:
    """A loop with everything in it recorded in one log."""

    def __init__(self, trainer: Any, batches: Any, budget: Budget, **options: Any) -> None:
        self.trainer = trainer
        self.events: list[Event] = []
        self.positions: list[Position] = []
        self.progress: list[float] = []
        if options.pop("saving", True):
            options["save"] = self._save
        if options.pop("evaluating", True):
            options["evaluate"] = self._evaluate
        self.loop = Loop(
            trainer, batches, self._values, budget, self._emit, clock=trainer.clock, **options
        )

    def _values(self, progress: float) -> dict[str, float]:
        self.progress.append(progress)
        return {"train.lr": 0.5 * progress}

    def _emit(self, event: Event) -> None:
        self.events.append(event)
        self.trainer.log.append(f"{event.event} {getattr(event, 'step', '')}")

    def _save(self, position: Position) -> Saved:
        self.positions.append(Position(**vars(position)))
        self.trainer.clock.now += 50.0
        return Saved(position.step, f"checkpoints/{position.step}", 50.0)

    def _evaluate(self, step: int) -> Evaluated:
        self.trainer.clock.now += 70.0
        return Evaluated(step, 1.0, None)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture(scope="module")
def make(bigram, stream, clocks):
    def run(budget: Budget, *, empty: Any = (), trainer: dict | None = None, **options: Any) -> Run:
        return Run(bigram(clock=clocks(), **(trainer or {})), stream(empty), budget, **options)

    return run


def test_each_step_is_read_after_the_next_one_is_queued(make) -> None:
    run = make(Budget(steps=3))
    run.loop.run()
    assert run.trainer.log == [
        "step 1",
        "step 2",
        "read 1",
        "step 1",
        "step 3",
        "read 2",
        "step 2",
        "read 3",
        "step 3",
        "save 3",
        "eval 3",
        "end 3",
    ]


def test_saves_and_evaluations_come_when_due_and_once_at_the_end(make) -> None:
    run = make(Budget(steps=6), cadence=Cadence(evaluate=2, save=3))
    run.loop.run()
    order = [f"{event.event} {event.step}" for event in run.events]
    assert order == [
        *("step 1", "step 2", "eval 2"),
        *("step 3", "save 3", "step 4", "eval 4"),
        *("step 5", "step 6", "save 6", "eval 6"),
        "end 6",
    ]
    assert run.of(Ended)[0].exit == 0


@settings(max_examples=60, deadline=None)
@given(
    steps=st.integers(1, 25),
    evaluate=st.integers(0, 8),
    save=st.integers(0, 8),
    late=st.booleans(),
)
def test_events_for_any_cadence(make, steps: int, evaluate: int, save: int, late: bool) -> None:
    run = make(Budget(steps=steps), trainer={"late": late}, cadence=Cadence(evaluate, save))
    position = run.loop.run()

    def due(every: int) -> list[int]:
        return sorted({*(range(every, steps + 1, every) if every else ()), steps})

    assert [event.step for event in run.of(Stepped)] == list(range(1, steps + 1))
    assert [event.step for event in run.of(Evaluated)] == due(evaluate)
    assert [event.step for event in run.of(Saved)] == due(save)
    assert [event.step for event in run.events] == sorted(event.step for event in run.events)
    assert isinstance(run.events[-1], Ended)
    assert position.step == steps
    assert position.cursor == {"batch": steps}
    assert position.tokens == run.of(Stepped)[-1].tokens == 11 * steps


def test_nothing_to_save_or_evaluate_with(make) -> None:
    run = make(Budget(steps=3), cadence=Cadence(1, 1), saving=False, evaluating=False)
    run.loop.run()
    assert [event.event for event in run.events] == ["step"] * 3 + ["end"]


def test_it_learns(make) -> None:
    run = make(Budget(steps=60))
    run.loop.run()
    losses = [event.loss for event in run.of(Stepped)]
    assert losses[0] == pytest.approx(math.log(8))
    assert losses[-1] < 0.2


def test_schedules_stand_at_step_over_steps(make) -> None:
    run = make(Budget(steps=4))
    run.loop.run()
    assert run.progress == [0.25, 0.5, 0.75, 1.0]
    assert [event.lr for event in run.of(Stepped)] == [0.125, 0.25, 0.375, 0.5]


def test_a_run_by_the_clock_ends_by_it_and_the_schedule_follows(make) -> None:
    run = make(Budget(minutes=1), trainer={"cost": 6.0}, saving=False, evaluating=False)
    run.loop.run()
    # the first step, which compiles, is not counted; its end is known when the second is queued
    assert run.progress[:3] == [0.0, 0.0, pytest.approx(0.0)]
    assert run.progress[3:] == pytest.approx([0.1 * n for n in range(1, len(run.progress) - 2)])
    assert len(run.of(Stepped)) == 12


@pytest.mark.parametrize("late", [False, True])
def test_a_run_by_the_clock_overshoots_by_at_most_two_steps(make, late: bool) -> None:
    run = make(Budget(minutes=1), trainer={"cost": 7.0, "late": late}, evaluating=False)
    position = run.loop.run()
    assert 60 <= position.elapsed < 60 + 2 * 7.0


def test_evaluations_and_saves_are_on_the_clock(make) -> None:
    run = make(Budget(minutes=10), trainer={"cost": 1.0}, cadence=Cadence(evaluate=5))
    run.loop.run()
    steps = run.of(Stepped)[-1].step
    assert steps == pytest.approx(600 / (1 + 70 / 5), abs=6)


def test_with_both_bounds_the_first_one_counts(make) -> None:
    for budget, steps in [(Budget(steps=3, minutes=100), 3), (Budget(steps=100, minutes=0.1), 8)]:
        run = make(budget, trainer={"cost": 1.0})
        assert run.loop.run().step == steps
    with pytest.raises(ConfigError, match="how long"):
        Budget()


def test_a_run_goes_on_where_it_was(make) -> None:
    position = Position(step=4, tokens=44, elapsed=30.0, saved=4)
    run = make(Budget(steps=6), position=position)
    run.loop.run()
    assert [event.step for event in run.of(Stepped)] == [5, 6]
    assert run.of(Stepped)[-1].tokens == 66
    assert [event.step for event in run.of(Saved)] == [6]

    run = make(Budget(minutes=1), trainer={"cost": 1.0}, position=Position(4, 44, 30.0))
    run.loop.run()
    assert run.progress[0] == 0.5
    assert run.positions[-1].elapsed >= 60


def test_a_finished_run_only_says_so(make) -> None:
    run = make(Budget(steps=3), position=Position(step=3, saved=3), evaluating=False)
    run.loop.run()
    assert [event.event for event in run.events] == ["end"]


def test_batches_without_labels_are_passed_over_and_counted(make) -> None:
    run = make(Budget(steps=4), empty={1, 3, 4})
    position = run.loop.run()
    assert [(event.step, event.skipped) for event in run.of(Skipped)] == [(1, 1), (2, 2), (2, 3)]
    assert [event.step for event in run.of(Stepped)] == [1, 2, 3, 4]
    assert position.skipped == 3
    assert position.cursor == {"batch": 7}
    assert all(math.isfinite(event.loss) for event in run.of(Stepped))


def test_data_without_any_label_ends_the_run(make) -> None:
    run = make(Budget(steps=4), empty=range(3, 10_000))
    with pytest.raises(DataError, match=f"{EMPTY_IN_A_ROW} batches in a row"):
        run.loop.run()
    assert run.of(Ended) == [Ended(2, 2, pytest.approx(2.0))]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_loss_that_is_no_number_ends_the_run(make, loss: float, step: int) -> None:
    run = make(Budget(steps=5), trainer={"losses": {step: loss}}, cadence=Cadence(save=2))
    with pytest.raises(NonFinite, match=f"loss of step {step} is") as error:
        run.loop.run()
    assert error.value.exit_code == 5
    before = (step - 1) // 2 * 2
    told = f"step {before}" if before else "no checkpoint"
    assert told in str(error.value)
    assert [event.step for event in run.of(Stepped)] == list(range(1, step))
    assert max((event.step for event in run.of(Saved)), default=0) == before
    assert run.of(Ended)[0].exit == 5


def send(number: int, at: int):
    """Send this process a signal while a step is running."""

    def on_step(step: int) -> None:
        if step == at:
            signal.raise_signal(number)

    return on_step


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(make, number: int) -> None:
    with stop_on_signals() as stop:
        run = make(Budget(steps=9), stop=stop)
        run.trainer.on_step = send(number, at=4)
        with pytest.raises(Stopped, match="after step 4; the checkpoint of step 4") as error:
            run.loop.run()
    assert error.value.exit_code == 75
    assert [event.event for event in run.events] == ["step"] * 4 + ["save", "end"]
    assert run.of(Ended)[0].exit == 75


def test_a_signal_without_checkpoints_saves_nothing_and_says_so(make) -> None:
    with stop_on_signals() as stop:
        run = make(Budget(steps=9), stop=stop, saving=False)
        run.trainer.on_step = send(signal.SIGINT, at=4)
        with pytest.raises(Interrupted, match="nothing was saved") as error:
            run.loop.run()
    assert error.value.exit_code == 130
    assert [event.event for event in run.events] == ["step"] * 4 + ["end"]


def test_a_signal_before_the_first_step(make) -> None:
    stop = StopRequest()
    stop.receive(signal.SIGINT)
    run = make(Budget(steps=9), stop=stop)
    with pytest.raises(Interrupted, match="after step 0"):
        run.loop.run()
    run = make(Budget(steps=9), stop=stop, position=Position(step=3, saved=3))
    with pytest.raises(Stopped, match="checkpoint of step 3"):
        run.loop.run()
    assert run.of(Saved) == []


@pytest.mark.parametrize(
    ("cadence", "error"), [(Cadence(), Interrupted), (Cadence(save=2), Stopped)]
)
def test_the_second_signal_ends_the_run_at_once(make, cadence: Cadence, error: type) -> None:
    with stop_on_signals() as stop:
        run = make(Budget(steps=9), stop=stop, cadence=cadence)

        def twice(step: int) -> None:
            if step == 3:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
                raise AssertionError("the second signal did not end the step")

        run.trainer.on_step = twice
        with pytest.raises(error):
            run.loop.run()
    assert "read 2" in run.trainer.log or cadence == Cadence()
    assert run.of(Ended)[0].exit == error.exit_code


def test_a_signal_in_the_last_step_changes_nothing(make) -> None:
    with stop_on_signals() as stop:
        run = make(Budget(steps=4), stop=stop)
        run.trainer.on_step = send(signal.SIGINT, at=4)
        run.loop.run()
    assert run.of(Ended)[0].exit == 0
    assert run.of(Evaluated)


def test_a_keyboard_interrupt_that_no_signal_brought_passes_through(make) -> None:
    run = make(Budget(steps=4))

    def raise_it(step: int) -> None:
        raise KeyboardInterrupt

    run.trainer.on_step = raise_it
    with pytest.raises(KeyboardInterrupt):
        run.loop.run()
    assert run.of(Ended)[0].exit == 130


def test_the_first_error_is_reported_whatever_observers_make_of_the_end(make) -> None:
    run = make(Budget(steps=4), trainer={"losses": {1: math.nan}})
    real = run.loop.emit

    def broken(event: Event) -> None:
        real(event)
        if isinstance(event, Ended):
            raise OSError("disk full")

    run.loop.emit = broken
    with pytest.raises(NonFinite):
        run.loop.run()
