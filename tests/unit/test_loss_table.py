"""Tests that the README's table of time to loss matches the result files."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.loss_table import PAGE, below, best, row, sooner, soonest, told_settings

TARGET = {"loss": 4.5, "peer": "theirs"}
RUNS = [
    {"peer": "theirs", "val_loss": 4.5, "total_seconds": 100.0, "seconds": {"4.5": 100.0}},
    {"peer": "theirs", "val_loss": 4.2, "total_seconds": 200.0, "seconds": {"4.5": 90.0}},
    {"peer": "modded-nanogpt", "val_loss": 4.6, "total_seconds": 9.0, "seconds": {}},
]


def job(seconds: float | None, *, preset: str = "speedrun", steps: int = 10, **more: Any) -> dict:
    end = {
        "step": steps,
        "seconds": seconds or 1.0,
        "tokens": 1,
        "val_loss": 4.0 if seconds else 5.0,
    }
    return {"preset": preset, "settings": [f"train.steps={steps}"], "curve": [end], **more}


def test_the_readme_shows_the_results() -> None:
    assert PAGE.made() == PAGE.text(), "python -m benchmarks.loss_table --write"


def test_a_targets_time_is_that_of_the_run_that_ended_there() -> None:
    said = row(TARGET, [job(8.0, seed=0), job(10.0, seed=1)], [job(50.0)], RUNS)
    assert said == (
        "4.5 (theirs)",
        "100.0 s",
        "-",
        "-",
        "50.0 s",
        "**9.0 s** (10 steps, 2 seeds)",
        "**0.090**",
    )


def test_a_target_that_was_not_reached_has_no_row() -> None:
    with pytest.raises(SystemExit, match=r"4\.5 of theirs was not reached"):
        row(TARGET, [job(None), job(1.0, preset="gpt2-124m")], [], RUNS)
    with pytest.raises(SystemExit, match=r"no run of theirs in peers\.json ended at 4\.6"):
        row(TARGET | {"loss": 4.6}, [job(1.0)], [], RUNS)


@given(st.lists(st.floats(1, 1e3), min_size=1, max_size=5), st.floats(1, 1e3))
def test_settings_count_where_every_seed_reached_the_loss(times: list[float], other: float) -> None:
    jobs = [job(time, steps=10) for time in times] + [job(other, steps=20)]
    mean = sum(times) / len(times)
    found = best(jobs, "speedrun", 4.5)
    assert found is not None
    assert found[0] == pytest.approx(min(mean, other))
    assert best([*jobs, job(None, steps=10)], "speedrun", 4.5) == (other, "20 steps", 1)


def test_settings_beside_the_steps_are_told() -> None:
    told = told_settings(["train.steps=7", "train.cooldown=0.3"])
    assert told == "7 steps, `train.cooldown=0.3`"


def test_a_preset_with_plugins_of_its_own_is_another_kind() -> None:
    assert best([job(1.0, plugins="liger")], "speedrun", 4.5) is None


@given(st.floats(1, 1e3), st.floats(0.001, 0.5), st.floats(0, 1))
def test_validations_far_apart_tell_the_later_time(at: float, gap: float, share: float) -> None:
    times, losses = (at, at * (1 + gap)), (5.0, 4.0)
    curve = [{"seconds": t, "tokens": 1, "val_loss": v} for t, v in zip(times, losses, strict=True)]
    loss = 4.001 + 0.998 * share
    seconds = below(curve, loss)
    assert seconds is not None
    crossed = at * (1 + gap * (5.0 - loss))
    assert seconds == pytest.approx(crossed, abs=1e-3) or seconds == times[1]
    if gap < 0.09:
        assert seconds == pytest.approx(crossed, abs=1e-3)
    if gap > 0.2:
        assert seconds == times[1]
    assert below(curve, 3.9) is None


def test_the_soonest_of_a_peers_runs() -> None:
    assert soonest(RUNS, "theirs", 4.5) == 90.0
    assert soonest(RUNS, "modded-nanogpt", 4.5) is None
    assert sooner(TARGET, RUNS) == 90.0
    assert sooner(TARGET, RUNS[:1]) is None
