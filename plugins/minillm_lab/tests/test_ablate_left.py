"""Tests of an ablation's remaining-time estimate: exact to the second where runs are equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_lab.ablation import RunProgress, RunSpec
from minillm_lab.cli.ablate import KNOWN, RemainingTime


class Clock:
    """A clock that is advanced by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def told(
    left: RemainingTime,
    clock: Clock,
    course: Sequence[RunSpec],
    done: Sequence[RunSpec] = (),
    *,
    pace: float,
    same: float,
    other: float,
) -> Iterator[RunProgress]:
    """Simulate runs with ``pace`` seconds per step and ``same`` or ``other`` seconds between two runs."""
    before = ""
    for run in course:
        if run in done:
            continue
        clock.now += same if run.variant == before else other
        for step in range(1, run.steps + 1):
            clock.now += pace
            going = RunProgress.of(run, course, done)
            assert left.note(going, step / run.steps) == (step == 1)
            yield going
        before = run.variant


@given(
    variants=st.integers(2, 5),
    seeds=st.integers(1, 4),
    steps=st.integers(2, 30),
    further=st.integers(2, 30),
    pace=st.floats(0.01, 1e2),
    same=st.floats(0, 10),
    other=st.floats(0, 100),
)
def test_it_is_right_where_all_runs_are_alike(
    variants: int, seeds: int, steps: int, further: int, pace: float, same: float, other: float
) -> None:
    course = [RunSpec(f"v{v}", s, steps) for v in range(variants) for s in range(seeds)]
    course += [RunSpec("v0", s, further + steps) for s in range(seeds)]
    clock = Clock()
    left = RemainingTime(clock)
    said = [
        (clock.now, left.seconds, going)
        for going in told(left, clock, course, pace=pace, same=same, other=other)
    ]
    assert said[-1][2].number == said[-1][2].runs == len(course)
    assert left.seconds == pytest.approx(0, abs=1e-9)
    for now, seconds, going in said:
        if going.number > 2:  # the time between two runs of a variant is measured by then
            assert seconds == pytest.approx(clock.now - now, rel=1e-6, abs=1e-6 * clock.now)


def test_nothing_is_said_before_two_steps_were_timed() -> None:
    clock = Clock()
    left = RemainingTime(clock)
    assert (left.seconds, left.known) == (None, False)
    course = [RunSpec(variant, seed, 20) for variant in ("baseline", "+a") for seed in (0, 1)]
    seen = []
    for going in told(left, clock, course, pace=1.0, same=0.0, other=30.0):
        if going.number == 1:
            seen.append((left.seconds, left.known))
    assert seen[0] == (None, False)
    assert [known for _, known in seen] == [(i + 1) / 20 >= KNOWN for i in range(20)]
    # the rest of this run, three more, and the compilation of the other variant
    assert seen[1][0] == pytest.approx(18 + 60 + 30)


def test_what_was_there_already_is_counted_and_not_waited_for() -> None:
    clock = Clock()
    left = RemainingTime(clock)
    course = [RunSpec(variant, seed, 10) for variant in ("all", "-a") for seed in range(3)]
    done = [course[0], course[1], course[4]]
    going = [
        (one.number, one.runs, left.seconds)
        for one in told(left, clock, course, done, pace=1, same=0, other=0)
    ]
    assert {number for number, _, _ in going} == {3, 4, 6}
    assert {runs for _, runs, _ in going} == {6}
    assert going[9][2] == pytest.approx(20)


def test_several_processes_are_timed_together_once_they_train() -> None:
    clock = Clock()
    left = RemainingTime(clock)
    course = [RunSpec(f"v{v}", seed, 10) for v in range(4) for seed in range(2)]
    done: list[RunSpec] = []

    def note(under_way: float, seconds: float) -> float | None:
        clock.now += seconds
        left.note(RunProgress.of(course[0], course, done, under_way), under_way)
        return left.seconds

    assert note(0.0, 0) is None
    assert note(0.0, 300) is None  # all of them compile
    assert note(0.5, 10) == pytest.approx(7.5 * 20)
    assert not left.known
    done.append(course[2])
    assert note(0.5, 20) == pytest.approx(6.5 * 20)
    assert left.known
    done += [run for run in course if run not in done]
    assert note(0.0, 130) == pytest.approx(0)
    course += [RunSpec("v0", seed, 12) for seed in range(2)]  # those at equal seconds
    assert note(0.0, 40) is None
    assert note(0.5, 12) == pytest.approx(1.5 * 24)


def test_a_run_of_no_course_is_alone() -> None:
    run = RunSpec("+a", 1, 5)
    assert RunProgress.of(run, (), ()) == RunProgress(run)
    assert run.label == "+a, seed 1, 5 steps"
    assert run.file == "with-a-seed1-5.json"
