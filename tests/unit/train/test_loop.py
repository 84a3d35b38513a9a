"""Tests of the training loop: order of actions, ends, and events."""

from __future__ import annotations

import itertools
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core.backends.base import Snapshot, StepResult
from minillm_core.backends.ranks import Ranks
from minillm_core.checkpoint.writer import Result
from minillm_core.data import Cancelled
from minillm_core.errors import (
    ConfigError,
    DataError,
    Interrupted,
    MinillmError,
    NonFinite,
    PluginCodeError,
    Stopped,
)
from minillm_core.train import checkpoints as guard
from minillm_core.train.budget import Budget, Cadence, LastSave, Position
from minillm_core.train.checkpoints import CheckpointManager
from minillm_core.train.events import (
    Ended,
    Evaluated,
    Event,
    Guarded,
    Rewound,
    Sampled,
    Saved,
    Skipped,
    Stepped,
    Unsaved,
)
from minillm_core.train.loop import EMPTY_IN_A_ROW, Loop
from minillm_core.train.progress import LineDisplay
from minillm_core.train.signals import StopRequest, stop_on_signals


class Saves:
    """A writer whose saves end when waited for, or ``delay`` steps later."""

    def __init__(self, delay: int = 0, failing: Any = (), go_on: bool = False) -> None:
        self.begun: list[Position] = []
        self.delay, self.failing, self.go_on = delay, set(failing), go_on
        self.open: list[tuple[int, int]] = []  # (step, requested)

    def submit(self, step: int, snapshot: Any, scalars: dict[str, Any], beside: Any) -> None:
        self.open = [(step, self.delay) for step, _ in self.open]  # the previous one is waited for
        self.begun.append(Position.of(scalars))
        self.open.append((step, 0))

    def finished(self) -> Iterator[Result]:
        self.open = [(step, asked + 1) for step, asked in self.open]
        while self.open and self.open[0][1] > self.delay:
            yield self._result(self.open.pop(0)[0])

    def wait(self) -> Iterator[Result]:
        while self.open:
            yield self._result(self.open.pop(0)[0])

    def _result(self, step: int) -> Result:
        if step not in self.failing:
            return Result(step, Path(f"checkpoints/{step}"), 50.0)
        return Result(step, None, 50.0, MinillmError("the disk is full"))


class Checkpoints(CheckpointManager):
    """A manager whose rewind is set by the test."""

    way_back: Callable[[int, int], tuple[Position, int]] | None = None

    def rewind(self, step: int, rewinds: int) -> tuple[Position, int] | None:
        found = self.way_back(step, rewinds) if self.way_back else None
        if found:
            self.begun = found[0].step
        return found


class Run:
    """A loop whose parts all record into one log."""

    def __init__(self, trainer: Any, batches: Any, budget: Budget, **options: Any) -> None:
        self.trainer = trainer
        self.events: list[Event] = []
        self.said: list[str] = []
        self.progress: list[float] = []
        self.saves: Any = options.pop("saves", None) or Saves()
        check, contain = options.pop("check", lambda: None), options.pop("contain", nullcontext)
        source: Any = SimpleNamespace(snapshot=lambda: Snapshot(dict))
        checkpoints = Checkpoints(self._emit, self.said.append, check, trainer=source)
        checkpoints.way_back = options.pop("rewind", None)
        checkpoints.begun = options.get("position", Position()).saved
        if options.pop("saving", True):
            checkpoints.writer = self.saves
            checkpoints.on_error = "continue" if self.saves.go_on else "stop"
        if options.pop("evaluating", True):
            options["evaluate"] = self._evaluate
        self.loop = Loop(
            trainer,
            batches,
            self._values,
            budget,
            self._emit,
            checkpoints=checkpoints,
            contain=contain,
            shown=LineDisplay(self.said.append, trainer.clock),
            **options,
        )

    def _values(self, progress: float) -> dict[str, float]:
        self.progress.append(progress)
        return {"train.lr": 0.5 * progress}

    def _emit(self, event: Event) -> None:
        self.events.append(event)
        self.trainer.log.append(f"{event.event} {getattr(event, 'step', '')}")

    def _evaluate(self, step: int) -> Evaluated:
        self.trainer.clock.now += 70.0
        return Evaluated(step, 1.0, None)

    def run(self, *, evaluate_first: bool = False) -> Position:
        for _ in self.loop.steps(evaluate_first=evaluate_first):
            pass
        return self.loop.position

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture(scope="module")
def make(bigram, stream, clocks):
    def run(budget: Budget, *, empty: Any = (), trainer: dict | None = None, **options: Any) -> Run:
        return Run(bigram(clock=clocks(), **(trainer or {})), stream(empty), budget, **options)

    return run


def test_each_step_is_read_after_the_next_one_is_queued(make) -> None:
    run = make(Budget(steps=3))
    run.run()
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
        "eval 3",
        "save 3",
        "end 3",
    ]


def test_saves_and_evaluations_come_when_due_and_once_at_the_end(make) -> None:
    run = make(Budget(steps=6), cadence=Cadence(evaluate=2, save=3))
    run.run()
    order = [f"{event.event} {event.step}" for event in run.events]
    assert order == [
        *("step 1", "step 2", "eval 2"),
        *("step 3", "save 3", "step 4", "eval 4"),
        *("step 5", "step 6", "eval 6", "save 6"),
        "end 6",
    ]
    assert run.of(Ended)[0].exit == 0


@settings(max_examples=60, deadline=None)
@given(
    steps=st.integers(1, 25),
    evaluate=st.integers(0, 8),
    save=st.integers(0, 8),
    late=st.booleans(),
    delay=st.integers(0, 9),
)
def test_events_for_any_cadence(
    make, steps: int, evaluate: int, save: int, late: bool, delay: int
) -> None:
    run = make(
        Budget(steps=steps),
        trainer={"late": late},
        cadence=Cadence(evaluate, save),
        saves=Saves(delay),
    )
    position = run.run()

    def due(every: int) -> list[int]:
        return sorted({*(range(every, steps + 1, every) if every else ()), steps})

    assert [event.step for event in run.of(Stepped)] == list(range(1, steps + 1))
    assert [event.step for event in run.of(Evaluated)] == due(evaluate)
    assert [event.step for event in run.of(Saved)] == due(save)
    assert [position.step for position in run.saves.begun] == due(save)
    assert [position.tokens for position in run.saves.begun] == [11 * n for n in due(save)]
    others = [event.step for event in run.events if not isinstance(event, Saved)]
    assert others == sorted(others)
    assert isinstance(run.events[-1], Ended)
    assert position.step == steps
    assert position.cursor == {"batch": steps}
    assert position.tokens == run.of(Stepped)[-1].tokens == 11 * steps


def test_nothing_to_save_or_evaluate_with(make) -> None:
    run = make(Budget(steps=3), cadence=Cadence(1, 1), saving=False, evaluating=False)
    run.run()
    assert [event.event for event in run.events] == ["step"] * 3 + ["end"]


def test_it_learns(make) -> None:
    run = make(Budget(steps=60))
    run.run()
    losses = [event.loss for event in run.of(Stepped)]
    assert losses[0] == pytest.approx(math.log(8))
    assert losses[-1] < 0.2


def test_schedules_stand_at_step_over_steps(make) -> None:
    run = make(Budget(steps=4))
    run.run()
    assert run.progress == [0.25, 0.5, 0.75, 1.0]
    assert [event.lr for event in run.of(Stepped)] == [0.125, 0.25, 0.375, 0.5]


def test_a_run_by_the_clock_ends_by_it_and_the_schedule_follows(make) -> None:
    run = make(Budget(minutes=1), trainer={"cost": 6.0}, saving=False, evaluating=False)
    run.run()
    # the first step, which compiles, is not counted; its end is known when the second is enqueued
    assert run.progress[:3] == pytest.approx([0.0] * 3, abs=1e-6)
    assert min(run.progress) > 0  # rates divide by it
    assert run.progress[3:] == pytest.approx([0.1 * n for n in range(1, len(run.progress) - 2)])
    assert len(run.of(Stepped)) == 12


@pytest.mark.parametrize("late", [False, True])
def test_a_run_by_the_clock_overshoots_by_at_most_two_steps(make, late: bool) -> None:
    run = make(Budget(minutes=1), trainer={"cost": 7.0, "late": late}, evaluating=False)
    position = run.run()
    assert 60 <= position.elapsed < 60 + 2 * 7.0


@pytest.mark.parametrize(
    ("steps", "due"),
    [(360, [60, 120, 180, 240, 300, 360]), (7, [2, 3, 4, 5, 6, 7]), (3, [1, 2, 3]), (1, [1])],
)
def test_evaluations_come_at_every_sixth_of_the_steps(make, steps: int, due: list[int]) -> None:
    run = make(Budget(steps), cadence=Cadence(evaluate=None), saving=False)
    run.run()
    assert [event.step for event in run.of(Evaluated)] == due


@pytest.mark.parametrize("late", [False, True])
def test_what_is_compiled_on_the_way_is_on_no_clock(make, late: bool) -> None:
    trainer = {"cost": 6.0, "late": late}
    run = make(Budget(minutes=1), trainer=trainer, saving=False, evaluating=False)

    def compiles(step: int) -> None:
        if step in (3, 7):
            run.trainer.clock.now += 40.0
            run.trainer.compile_seconds += 40.0

    run.trainer.on_step = compiles
    position = run.run()
    assert 60 <= position.elapsed < 60 + 2 * 6.0
    assert position.step >= 10
    seconds = [event.step_seconds for event in run.of(Stepped)]
    assert sum(seconds[1:]) == pytest.approx(6.0 * (len(seconds) - 1), abs=6.0)
    assert max(seconds[1:]) <= 12.0


def test_evaluations_come_at_every_sixth_of_the_minutes(make) -> None:
    cadence, clock = Cadence(evaluate=None), {"cost": 10.0}
    run = make(Budget(minutes=60), trainer=clock, cadence=cadence, saving=False)
    run.run(evaluate_first=True)
    # evaluations of 70 s are on the clock, those before the first step and after the last are not
    assert [event.step for event in run.of(Evaluated)] == [0, 62, 115, 168, 221, 274, 327]


def test_samples_follow_evaluations_and_come_last_of_all(make) -> None:
    asked: list[tuple[int, bool]] = []

    def samples(step: int, last: bool) -> Iterator[Event]:
        asked.append((step, last))
        yield Sampled(step, "a", "b")

    run = make(Budget(4), cadence=Cadence(evaluate=2), samples=samples)
    run.run(evaluate_first=True)
    assert asked == [(0, False), (2, False), (4, True)]
    assert [event.event for event in run.events[-4:]] == ["eval", "save", "sample", "end"]


def test_evaluations_are_on_the_clock(make) -> None:
    run = make(Budget(minutes=10), trainer={"cost": 1.0}, cadence=Cadence(evaluate=5))
    run.run()
    steps = run.of(Stepped)[-1].step
    assert steps == pytest.approx(600 / (1 + 70 / 5), abs=6)


def test_steps_or_minutes_say_how_long_to_train() -> None:
    for bounds in ({}, {"steps": 3, "minutes": 1}):
        with pytest.raises(ConfigError, match="how long"):
            Budget(**bounds)


def test_a_run_goes_on_where_it_was(make) -> None:
    position = Position(step=4, tokens=44, elapsed=30.0, saved=4)
    run = make(Budget(steps=6), position=position)
    run.run()
    assert [event.step for event in run.of(Stepped)] == [5, 6]
    assert run.of(Stepped)[-1].tokens == 66
    assert [event.step for event in run.of(Saved)] == [6]

    run = make(Budget(minutes=1), trainer={"cost": 1.0}, position=Position(4, 44, 30.0))
    run.run()
    assert run.progress[0] == 0.5
    assert run.saves.begun[-1].elapsed >= 60


def test_a_finished_run_only_says_so(make) -> None:
    run = make(Budget(steps=3), position=Position(step=3, saved=3), evaluating=False)
    run.run()
    assert [event.event for event in run.events] == ["end"]


def test_batches_without_labels_are_passed_over_and_counted(make) -> None:
    run = make(Budget(steps=4), empty={1, 3, 4})
    position = run.run()
    assert [(event.step, event.skipped) for event in run.of(Skipped)] == [(1, 1), (2, 2), (2, 3)]
    assert [event.step for event in run.of(Stepped)] == [1, 2, 3, 4]
    assert position.skipped == 3
    assert position.cursor == {"batch": 7}
    assert all(math.isfinite(event.loss) for event in run.of(Stepped))


def test_data_without_any_label_ends_the_run(make) -> None:
    run = make(Budget(steps=4), empty=range(3, 10_000))
    with pytest.raises(DataError, match=f"{EMPTY_IN_A_ROW} batches in a row hold no supervised"):
        run.run()
    (ended,) = run.of(Ended)
    assert (ended.step, ended.exit) == (2, 1)  # 2 would mean that nothing was started
    assert ended.seconds == pytest.approx(2.0)


def test_data_without_any_label_from_the_start_is_refused(make) -> None:
    run = make(Budget(steps=4), empty=range(10_000))
    with pytest.raises(DataError, match="hold no supervised token"):
        run.run()
    assert [(one.step, one.exit) for one in run.of(Ended)] == [(0, 2)]


def test_an_evaluation_without_a_label_ends_the_run_once_it_trains(make) -> None:
    def evaluate(step: int) -> None:
        raise DataError("there is nothing to predict")

    run = make(Budget(steps=4), cadence=Cadence(evaluate=2))
    run.loop.evaluate = evaluate
    with pytest.raises(DataError):
        run.run()
    assert [(one.step, one.exit) for one in run.of(Ended)] == [(2, 1)]


def skipping(steps: Any, **marks: Any) -> Callable[[Any], StepResult]:
    """Return a read function of a trainer that skips the update of ``steps``."""

    def read(handle: Any) -> StepResult:
        step, loss, norm = handle
        bad = step in steps
        return StepResult(loss, math.nan if bad else norm, skipped=bad, **(marks if bad else {}))

    return read


@settings(max_examples=40, deadline=None)
@given(st.sets(st.integers(1, 130), max_size=30), st.integers(0, 12))
def test_ten_of_a_hundred_steps_that_are_not_finite_end_the_run(
    make, bad: set[int], save: int
) -> None:
    run = make(Budget(steps=130), cadence=Cadence(save=save), evaluating=False)
    run.trainer.read = skipping(bad)
    counts = {n: sum(n - guard.WINDOW < one <= n for one in bad) for n in sorted(bad)}
    fatal = next((n for n, count in counts.items() if count >= guard.LIMIT), None)
    if fatal is None:
        run.run()
    else:
        with pytest.raises(NonFinite, match=f"10 of the last 100 .* step {fatal} is") as error:
            run.run()
        assert error.value.exit_code == 5
        last = max((event.step for event in run.of(Saved)), default=None)
        told = "no checkpoint" if last is None else f"the last good checkpoint: step {last}"
        assert told in str(error.value)
    expected = [(n, count) for n, count in counts.items() if fatal is None or n <= fatal]
    assert [(event.step, event.recent) for event in run.of(Guarded)] == expected
    assert run.of(Ended)[0].exit == (5 if fatal else 0)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_counts_and_the_next_step_comes(make, loss: float) -> None:
    run = make(Budget(steps=5), trainer={"losses": {3: loss}})
    run.run()
    assert [event.step for event in run.of(Guarded)] == [3]
    assert [event.step for event in run.of(Stepped)] == [1, 2, 3, 4, 5]


def test_the_count_goes_on_in_a_resumed_run(make) -> None:
    run = make(Budget(steps=60), position=Position(step=50, guarded=tuple(range(10, 19))))
    run.trainer.steps = 50
    run.trainer.read = skipping({55})
    with pytest.raises(NonFinite, match="10 of the last 100"):
        run.run()
    run = make(Budget(steps=200), position=Position(step=150, guarded=tuple(range(10, 19))))
    run.trainer.steps = 150
    run.trainer.read = skipping({155})
    assert run.run().guarded == (155,)


def test_overflows_of_float16_are_not_counted(make) -> None:
    run = make(Budget(steps=40))
    run.trainer.read = skipping(range(1, 40), overflow=True)
    run.run()
    assert run.of(Guarded) == []


def test_a_spike_goes_back_and_passes_over_batches(make) -> None:
    asked: list[int] = []

    def rewind(step: int, rewinds: int) -> tuple[Position, int]:
        asked.append(step)
        run.trainer.losses = {}
        return Position(step=20, tokens=220, cursor={"batch": 27}, saved=20), 7

    run = make(
        Budget(steps=40),
        trainer={"losses": dict.fromkeys(range(1, 31), 2.0) | {30: 4.1}},
        cadence=Cadence(evaluate=20, save=10),
        spike=2.0,
        rewind=rewind,
    )
    position = run.run()
    assert asked == [30]
    assert run.of(Rewound) == [Rewound(30, 4.1, 20, 7)]
    steps = [event.step for event in run.of(Stepped)]
    assert steps == [*range(1, 31), *range(21, 41)]
    assert [event.step for event in run.of(Evaluated)] == [20, 40]
    assert [one.step for one in run.saves.begun] == [10, 20, 30, 40]
    assert (position.step, position.rewinds) == (40, 1)


def test_a_spike_gives_no_time_back(make) -> None:
    def rewind(step: int, rewinds: int) -> tuple[Position, int]:
        run.trainer.losses = {}
        return Position(step=20, elapsed=20.0, saved=20), 7

    run = make(
        Budget(minutes=1),
        trainer={"cost": 1.0, "losses": dict.fromkeys(range(1, 31), 2.0) | {30: 4.1}},
        spike=2.0,
        rewind=rewind,
        evaluating=False,
    )
    assert 60 <= run.run().elapsed < 62
    assert len(run.of(Rewound)) == 1
    assert run.progress == sorted(run.progress)


def test_a_spike_without_a_checkpoint_that_is_old_enough_is_said(make) -> None:
    run = make(
        Budget(steps=30),
        trainer={"losses": dict.fromkeys(range(1, 31), 2.0) | {25: 9.0}},
        spike=1.0,
    )
    assert run.run().rewinds == 0
    assert "step 25 is a spike" in run.said[0]


def test_too_many_spikes_end_the_run(make) -> None:
    run = make(
        Budget(steps=30),
        trainer={"losses": dict.fromkeys(range(1, 31), 2.0) | {25: 9.0}},
        spike=1.0,
        position=Position(rewinds=guard.REWINDS),
    )
    with pytest.raises(NonFinite, match="spike at step 25, after 10 others"):
        run.run()


@given(st.lists(st.floats(0, 9), max_size=80), st.floats(0, 20), st.floats(0.1, 3))
def test_spikes_are_measured_from_the_median(losses: list[float], loss: float, nats: float) -> None:
    found = guard.is_spike(loss, losses, nats)
    if len(losses) < 16:
        assert not found
    else:
        ordered = sorted(losses)
        middle = (ordered[(len(losses) - 1) // 2] + ordered[len(losses) // 2]) / 2
        assert found == (loss > middle + nats)


def test_a_step_that_a_signal_cuts_short_is_dropped(make) -> None:
    stop = StopRequest()
    run = make(Budget(steps=9), stop=stop)
    real = run.trainer.step

    def step(micro: Any, values: Any, supervised: int, cancelled: Callable[[], bool]) -> Any:
        if run.trainer.steps == 3:
            assert not cancelled()
            stop.receive(signal.SIGTERM)  # between two micro-batches
            assert cancelled()
            return None
        return real(micro, values, supervised)

    run.trainer.step = step
    with pytest.raises(Stopped, match="SIGTERM after step 3; the checkpoint of step 3"):
        run.run()
    assert run.saves.begun[-1].cursor == {"batch": 3}
    assert run.said == ["saving step 3; SIGTERM, and a second signal stops without saving"]


def test_a_signal_while_a_batch_is_waited_for_ends_the_run(make) -> None:
    stop = StopRequest()
    run = make(Budget(steps=9), stop=stop)
    batches = run.loop.batches

    def waited() -> Iterator[Any]:
        yield from itertools.islice(batches, 3)
        stop.receive(signal.SIGINT)
        raise Cancelled

    run.loop.batches = waited()
    with pytest.raises(Stopped, match="SIGINT after step 3; the checkpoint of step 3"):
        run.run()


def test_what_a_plugin_did_is_told_with_the_step(make) -> None:
    run = make(Budget(steps=9))

    def broken(step: int) -> None:
        raise PluginCodeError("trick", "Gate.forward")

    run.trainer.on_step = lambda step: broken(step) if step == 4 else None
    with pytest.raises(PluginCodeError, match=r"raised in Gate\.forward, at step 4"):
        run.run()
    assert run.of(Ended)[0].exit == 3


def test_and_with_the_evaluation(make) -> None:
    run = make(Budget(steps=2))

    def broken(step: int) -> None:
        raise PluginCodeError("trick", "on_batch, phase eval")

    run.loop.evaluate = broken
    with pytest.raises(PluginCodeError, match="phase eval, in the evaluation after step 2"):
        run.run()


def test_the_end_is_told_with_the_code_that_the_error_comes_to(make) -> None:
    @contextmanager
    def contain() -> Iterator[None]:
        try:
            yield
        except ZeroDivisionError as error:
            raise PluginCodeError("trick", "forward") from error

    run = make(Budget(steps=9), contain=contain)
    run.trainer.on_step = lambda step: 1 / 0
    with pytest.raises(PluginCodeError):
        run.run()
    assert run.of(Ended)[0].exit == 3


def test_a_signal_in_the_last_evaluation_leaves_it_to_the_next_process(make) -> None:
    stop = StopRequest()
    run = make(Budget(steps=3), stop=stop)

    def cut(step: int) -> None:
        stop.receive(signal.SIGINT)

    run.loop.evaluate = cut
    with pytest.raises(Stopped, match="checkpoint of step 3"):
        run.run()
    assert run.of(Evaluated) == []

    run = make(Budget(steps=3), position=Position(step=3, saved=3))
    run.run(evaluate_first=True)
    assert [event.event for event in run.events] == ["eval", "end"]


def test_a_checkpoint_that_cannot_be_written_ends_the_run(make) -> None:
    run = make(Budget(steps=9), cadence=Cadence(save=2), saves=Saves(failing={4}))
    with pytest.raises(MinillmError, match="disk is full"):
        run.run()
    assert [event.step for event in run.of(Saved)] == [2]
    (ended,) = run.of(Ended)
    assert (ended.step, ended.exit) == (5, 1)
    assert ended.seconds == pytest.approx(5.0)


def test_or_the_run_goes_on_where_that_was_asked_for(make) -> None:
    run = make(Budget(steps=9), cadence=Cadence(save=2), saves=Saves(failing={4}, go_on=True))
    run.run()
    assert [event.step for event in run.of(Saved)] == [2, 6, 8, 9]
    assert [event.step for event in run.of(Unsaved)] == [4]


def test_but_its_last_checkpoint_is_not_given_up_silently(make) -> None:
    run = make(Budget(steps=4), cadence=Cadence(save=2), saves=Saves(failing={4}, go_on=True))
    with pytest.raises(MinillmError, match="last checkpoint could not be written") as error:
        run.run()
    assert "the last good checkpoint: step 2" in str(error.value)


def test_a_save_under_way_is_waited_for_when_something_else_fails(make) -> None:
    run = make(Budget(steps=9), empty=range(5, 10_000), cadence=Cadence(save=4), saves=Saves(99))
    with pytest.raises(DataError):
        run.run()
    assert [event.step for event in run.of(Saved)] == [4]


def send(number: int, at: int):
    """Send this process a signal during a step."""

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
            run.run()
    assert error.value.exit_code == 75
    assert [event.event for event in run.events] == ["step"] * 4 + ["save", "end"]
    assert run.of(Ended)[0].exit == 75


class Two(Ranks):
    """Two ranks, of which the other one does what this one does."""

    size = 2

    def all_gather(self, numbers: Any) -> list[tuple[float, ...]]:
        return 2 * super().all_gather(numbers)


@pytest.mark.parametrize("at", [0, 4, 9])
def test_several_ranks_evaluate_nothing_after_a_signal(make, at: int) -> None:
    """They agree on it after a step, and a rank without a held-out batch could not cancel its part."""
    stop = StopRequest()
    run = make(Budget(steps=9), stop=stop, cadence=Cadence(evaluate=1), ranks=Two())
    tell = run.loop.emit

    def emit(event: Event) -> None:
        tell(event)
        if isinstance(event, Evaluated) and event.step == max(at - 1, 0):
            stop.receive(signal.SIGTERM)

    run.loop.emit = emit
    with pytest.raises(Stopped if at else Interrupted, match=f"after step {at}"):
        run.run(evaluate_first=True)
    assert [event.step for event in run.of(Evaluated)] == list(range(max(at, 1)))


def test_a_signal_without_checkpoints_saves_nothing_and_says_so(make) -> None:
    with stop_on_signals() as stop:
        run = make(Budget(steps=9), stop=stop, saving=False)
        run.trainer.on_step = send(signal.SIGINT, at=4)
        with pytest.raises(Interrupted, match="nothing was saved") as error:
            run.run()
    assert error.value.exit_code == 130
    assert [event.event for event in run.events] == ["step"] * 4 + ["end"]


def test_a_signal_before_the_first_step(make) -> None:
    stop = StopRequest()
    stop.receive(signal.SIGINT)
    run = make(Budget(steps=9), stop=stop)
    with pytest.raises(Interrupted, match="after step 0"):
        run.run()
    run = make(Budget(steps=9), stop=stop, position=Position(step=3, saved=3))
    with pytest.raises(Stopped, match="checkpoint of step 3"):
        run.run()
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
            run.run()
    assert "read 2" in run.trainer.log or cadence == Cadence()
    assert run.of(Ended)[0].exit == error.exit_code


def test_a_signal_in_the_last_step_changes_nothing(make) -> None:
    with stop_on_signals() as stop:
        run = make(Budget(steps=4), stop=stop)
        run.trainer.on_step = send(signal.SIGINT, at=4)
        run.run()
    assert run.of(Ended)[0].exit == 0
    assert run.of(Evaluated)


def test_a_keyboard_interrupt_that_no_signal_brought_passes_through(make) -> None:
    run = make(Budget(steps=4))

    def raise_it(step: int) -> None:
        raise KeyboardInterrupt

    run.trainer.on_step = raise_it
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert run.of(Ended)[0].exit == 130


def test_the_first_error_is_reported_whatever_observers_make_of_the_end(make) -> None:
    run = make(Budget(steps=4), empty=range(2, 10_000))
    real = run.loop.emit

    def broken(event: Event) -> None:
        real(event)
        if isinstance(event, Ended):
            raise OSError("disk full")

    run.loop.emit = broken
    with pytest.raises(DataError):
        run.run()


def test_a_batch_that_was_passed_over_before_a_dropped_step_is_counted_once(make) -> None:
    stop = StopRequest()
    run = make(Budget(steps=9), stop=stop, empty=[4])

    def cut(step: Any) -> None:
        if isinstance(step, Skipped):
            stop.receive(signal.SIGTERM)

    tell, real = run.loop.emit, run.trainer.step
    run.loop.emit = lambda event: (tell(event), cut(event))
    run.trainer.step = lambda *given: None if given[3]() else real(*given)
    with pytest.raises(Stopped):
        run.run()
    saved = run.saves.begun[-1]
    assert run.of(Skipped)[-1].skipped == 1
    assert (saved.step, saved.skipped, saved.cursor) == (3, 0, {"batch": 3})


def test_a_spike_in_the_last_step_does_not_cut_the_run_short(make) -> None:
    def rewind(step: int, rewinds: int) -> tuple[Position, int]:
        run.trainer.losses = {}
        return Position(step=20, saved=20), 7

    run = make(
        Budget(steps=40),
        trainer={"losses": dict.fromkeys(range(1, 41), 2.0) | {40: 9.0}},
        cadence=Cadence(save=10),
        spike=2.0,
        rewind=rewind,
    )
    assert run.run().step == 40
    assert [event.step for event in run.of(Stepped)] == [*range(1, 41), *range(21, 41)]


def test_a_failure_names_the_save_that_is_under_way(make) -> None:
    run = make(Budget(steps=60), cadence=Cadence(save=4), saves=Saves(99))
    run.trainer.read = skipping(range(3, 60))
    with pytest.raises(NonFinite, match="the last good checkpoint: step 8"):
        run.run()


def test_by_default_a_twentieth_of_the_run_lies_between_two_checkpoints(make) -> None:
    run = make(Budget(steps=360), trainer={"cost": 1.0}, cadence=Cadence(save=None, minutes=5.0))
    run.run()
    assert [event.step for event in run.of(Saved)] == list(range(18, 361, 18))

    run = make(Budget(minutes=10), trainer={"cost": 1.0}, cadence=Cadence(save=None))
    run.run()
    gaps = [b - a for a, b in itertools.pairwise(p.elapsed for p in run.saves.begun)]
    assert len(gaps) == 19
    assert max(gaps) <= 32.0


def test_steps_that_take_less_than_a_second_are_saved_by_the_tenth(make) -> None:
    run = make(Budget(steps=60), trainer={"cost": 0.01}, cadence=Cadence(save=None))
    run.run()
    assert [event.step for event in run.of(Saved)] == list(range(6, 61, 6))


def test_a_save_by_the_clock_leaves_time_for_the_next_step_and_the_save_itself(make) -> None:
    run = make(
        Budget(steps=400),
        trainer={"cost": 7.0},
        cadence=Cadence(save=0, minutes=5.0),
        evaluating=False,
    )
    run.run()
    begun = [position.elapsed for position in run.saves.begun[:-1]]
    # a save takes 50 s here: at most 5 minutes between two checkpoints on disk
    assert all(200 <= b - a <= 300 - 50 for a, b in itertools.pairwise(begun[1:]))


@settings(max_examples=60, deadline=None)
@given(
    steps=st.integers(20, 3000),
    cost=st.floats(0.01, 40.0),
    commit=st.floats(0.0, 60.0),
    minutes=st.booleans(),
)
def test_a_kill_at_any_moment_costs_a_tenth_at_most(
    steps: int, cost: float, commit: float, minutes: bool
) -> None:
    """Tests the loop's rule alone: a save waits for the previous one, as in the writer."""
    cadence = Cadence(save=None, minutes=5.0 if minutes else 0.0, settle=0.0)
    now = looked = saved_at = 0.0
    share = durable = worst = 0.0
    writing: tuple[float, float] | None = None  # progress, and when it will be on disk
    for step in range(1, steps + 1):
        now += cost
        done = step / steps
        if writing and writing[1] <= now:
            durable, writing = writing[0], None
        worst = max(worst, done - durable)
        if cadence.saves(step, done, LastSave(share, now - saved_at, now - looked + commit)):
            if writing:
                now, durable = max(now, writing[1]), writing[0]
            share, saved_at, writing = done, now, (done, now + commit)
        looked = now
    assert worst <= 0.1 + 2 / steps + 1e-9


def test_nothing_is_saved_before_a_step_was_finite(make) -> None:
    run = make(Budget(steps=9), cadence=Cadence(save=2))
    run.trainer.read = skipping(range(1, 5))
    run.run()
    assert [event.step for event in run.of(Saved)] == [6, 8, 9]


@pytest.mark.parametrize("saving", [True, False])
def test_what_the_run_reads_is_checked_before_every_save_and_at_the_end(make, saving: bool) -> None:
    asked: list[int] = []

    def check() -> None:
        asked.append(run.loop.position.step)
        if len(asked) == 3:
            raise DataError("a file changed")

    cadence = Cadence(save=3) if saving else Cadence()
    run = make(Budget(steps=8), cadence=cadence, check=check, saving=saving)
    if saving:
        with pytest.raises(DataError, match="changed"):
            run.run()
        assert [event.step for event in run.of(Saved)] == [3, 6]
    else:
        run.run()
    assert asked == ([3, 6, 8] if saving else [8])
