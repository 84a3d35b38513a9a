"""Tests that throughput matches the clock, whether a device computes synchronously or asynchronously."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minillm_core.train.loop import Counts, Meter

seconds = st.floats(0.01, 10)


def drive(meter: Meter, costs: list[float], counts: Counts, *, late: bool) -> list:
    """Simulate steps with these costs, read one step late, as in the loop; the device is idle at first."""
    now = 50.0
    meter.restart(now)
    idle_at = now
    queued_at: list[float] = []
    done_at: list[float] = []
    figures = []

    def read(n: int) -> None:
        nonlocal now
        asked = now
        now = max(now, done_at[n])
        figures.append(meter.add(counts, queued=queued_at[n], asked=asked, read=now))

    for n, cost in enumerate(costs):
        idle_at = max(now, idle_at) + cost
        if not late:
            now = idle_at
        queued_at.append(now)
        done_at.append(idle_at)
        if n:
            read(n - 1)
    read(len(costs) - 1)
    return figures


@given(st.lists(seconds, min_size=2, max_size=30))
def test_a_device_that_computes_in_the_call_is_timed_step_by_step(costs: list[float]) -> None:
    meter = Meter(window=5)
    figures = drive(meter, costs, Counts(80, 100, 60), late=False)
    assert [each.seconds for each in figures] == pytest.approx(costs)
    for n, each in enumerate(figures):
        window = costs[max(1, n - 4) : n + 1] or costs[:1]
        assert each.tokens_per_second.real == pytest.approx(80 * len(window) / sum(window))
        assert each.tokens_per_second.padded == pytest.approx(100 * len(window) / sum(window))
        assert each.tokens_per_second.supervised == pytest.approx(60 * len(window) / sum(window))
    overall = meter.overall()
    assert overall is not None
    assert overall.real == pytest.approx(80 * (len(costs) - 1) / sum(costs[1:]))


@given(seconds, st.integers(3, 30))
def test_a_device_behind_the_call_is_timed_by_its_reads(cost: float, steps: int) -> None:
    meter = Meter()
    figures = drive(meter, [cost] * steps, Counts(10, 10, 10), late=True)
    assert [each.seconds for each in figures] == pytest.approx([cost] * steps)
    overall = meter.overall()
    assert overall is not None
    assert overall.real == pytest.approx(10 / cost)


@given(st.lists(seconds, min_size=3, max_size=30), st.booleans())
@example([5.0, 0.5, 0.03125], True)
def test_no_time_is_lost_and_none_counted_twice(costs: list[float], late: bool) -> None:
    figures = drive(Meter(), costs, Counts(1, 1, 1), late=late)
    total = sum(each.seconds for each in figures)
    # A read that hardly waited counts as one that did not wait: a tenth of a step at the very end,
    # and whole steps there that are as short compared with the previous one.
    short = 0.0
    for before, cost in zip(reversed(costs[:-1]), reversed(costs[1:]), strict=True):
        if cost > 0.1 * (before + cost):
            break
        short += cost
    assert total == pytest.approx(sum(costs), abs=short + 0.1 * sum(costs[-2:]) + 1e-6)
    assert all(each.seconds > 0 for each in figures)


def test_what_happens_between_steps_is_not_theirs() -> None:
    meter = Meter()
    meter.restart(0.0)
    counts = Counts(10, 10, 10)
    for start in (0.0, 100.0, 200.0):  # an evaluation of 99 seconds after each step
        meter.restart(start)
        figures = meter.add(counts, queued=start + 1, asked=start + 1, read=start + 1)
        assert figures.seconds == pytest.approx(1.0)
    assert figures.tokens_per_second.real == pytest.approx(10.0)


def test_mfu_is_known_where_the_peak_is() -> None:
    counts = Counts(100, 100, 100)
    assert Meter(flops_per_token=6.0).add(counts, queued=1, asked=1, read=1).mfu is None
    meter = Meter(flops_per_token=6.0, peak_flops=1000.0)
    meter.restart(0.0)
    assert meter.add(counts, queued=2.0, asked=2.0, read=2.0).mfu == pytest.approx(0.3)
    meter = Meter(flops_per_token=6.0, flops_per_label=4.0, peak_flops=1000.0)
    meter.restart(0.0)
    counts = Counts(100, 120, 25)  # 2 FLOPs per token, 4 per supervised token
    assert meter.add(counts, queued=2.0, asked=2.0, read=2.0).mfu == pytest.approx(0.15)


def test_a_clock_that_stands_still_divides_nothing_by_zero() -> None:
    meter = Meter()
    for _ in range(3):
        figures = meter.add(Counts(1, 1, 1), queued=0.0, asked=0.0, read=0.0)
        assert figures.seconds > 0
    assert meter.overall() is not None
    assert Meter().overall() is None
