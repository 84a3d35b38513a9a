"""What an ablation says of the time that is left: right to the second where runs are alike."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.cli.ablate_left import KNOWN, Left, runs_of

STEPS = 20


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def told(
    left: Left, clock: Clock, runs: list[str], *, pace: float, same: float, other: float
) -> Iterator[str]:
    """Runs whose steps take ``pace`` together; between two of them ``same`` or ``other``."""
    before = ""
    for run in runs:
        variant = run.partition(",")[0]
        clock.now += same if variant == before else other
        for step in range(1, STEPS + 1):
            clock.now += pace / STEPS
            left.told(f"{run}, {STEPS} steps", step / STEPS)
            yield run
        before = variant


@given(
    seeds=st.integers(1, 4),
    judged=st.integers(1, 4),
    pace=st.floats(0.1, 1e3),
    same=st.floats(0, 10),
    other=st.floats(0, 100),
    leave_one_out=st.booleans(),
)
def test_it_is_right_where_all_runs_are_alike(
    seeds: int, judged: int, pace: float, same: float, other: float, leave_one_out: bool
) -> None:
    names = [f"p{i}" for i in range(judged)]
    runs = runs_of(names, range(5, 5 + seeds), leave_one_out=leave_one_out)
    assert len(runs) == len(set(runs)) == (judged + 1) * seeds
    clock = Clock()
    left = Left(runs, None, clock)
    said = [
        (clock.now, left.seconds, run)
        for run in told(left, clock, runs, pace=pace, same=same, other=other)
    ]
    end = clock.now
    assert left.number == len(runs)
    for now, seconds, run in said:
        if run in runs[: max(seeds, 2)]:
            continue  # what is between two runs of a kind has not been seen yet
        assert seconds == pytest.approx(end - now, rel=1e-6, abs=1e-6 * end)


def test_nothing_is_said_before_two_steps_were_timed() -> None:
    clock = Clock()
    left = Left(runs_of(["a"], range(2), leave_one_out=False), STEPS, clock)
    assert (left.seconds, left.known) == (None, False)
    seen = []
    for _ in told(left, clock, ["baseline, seed 0"], pace=20.0, same=0.0, other=30.0):
        seen.append((left.seconds, left.known))
    assert seen[0] == (None, False)
    assert [known for _, known in seen] == [(i + 1) / STEPS >= KNOWN for i in range(STEPS)]
    # the rest of this run, three more, and the compilation of the other variant
    assert seen[1][0] == pytest.approx(18 + 60 + 30)


def test_a_run_at_equal_seconds_is_not_counted() -> None:
    clock = Clock()
    left = Left(runs_of(["a"], range(1), leave_one_out=False), STEPS, clock)
    for _ in told(left, clock, ["baseline, seed 0", "+a, seed 0"], pace=10, same=0, other=1):
        pass
    for share in (0.25, 0.5):
        clock.now += 2
        assert left.told("baseline, seed 0, 10 steps", share) == (share == 0.25)
    assert left.number is None
    assert left.seconds == pytest.approx(5)


def test_an_ablation_that_goes_on_counts_what_is_ahead() -> None:
    clock = Clock()
    runs = runs_of(["a", "b"], range(2), leave_one_out=True)
    left = Left(runs, STEPS, clock)
    for _ in told(left, clock, runs[4:5], pace=10, same=0, other=0):
        pass
    assert (left.number, left.runs) == (5, 6)
    assert left.seconds == pytest.approx(10)


def test_timing_a_step_beforehand_is_no_run() -> None:
    clock = Clock()
    left = Left(runs_of(["a"], range(2), leave_one_out=False), None, clock)
    assert left.told("measuring how long a step takes", 0.0)
    assert (left.number, left.seconds) == (None, None)
    for _ in told(left, clock, ["baseline, seed 0"], pace=10, same=0, other=5):
        pass
    assert left.number == 1
    assert left.seconds == pytest.approx(30 + 5)
