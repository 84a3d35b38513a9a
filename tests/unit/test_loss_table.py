"""Tests that the README's table of time to loss matches the result files."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.loss_table import PAGE, Reached, below, best, named, row, unreached

END = {"loss": 4.5, "peer": "theirs", "tokens": 63_000_000}


def job(time: float | None, *, preset: str = "speedrun", steps: int = 10, **more: Any) -> dict:
    end = {
        "step": steps,
        "seconds": time or 1.0,
        "tokens": 2_000_000,
        "val_loss": 4.0 if time else 5.0,
    }
    return {"preset": preset, "settings": [f"train.steps={steps}"], "curve": [end], **more}


def test_the_readme_shows_the_results() -> None:
    assert PAGE.generated() == PAGE.text(), "python -m benchmarks.loss_table --write"


def test_a_row_compares_the_settings_that_are_there_first() -> None:
    rival = [job(20.0, settings=["steps=1000", "rates halved"]), job(30.0)]
    said = row(4.5, END, [job(8.0, seed=0), job(10.0, seed=1)], rival)
    assert said == (
        "4.5 (theirs's last, after 63 M tokens)",
        "20.0 s, 2.0 M tokens (1,000 steps, rates halved)",
        "**9.0 s, 2.0 M tokens (10 steps, 2 seeds)**",
        "**0.45**",
        "1.00",
    )
    assert row(4.5, None, [job(8.0)], rival)[0] == "4.5"


def test_a_target_that_was_not_reached_has_no_row() -> None:
    with pytest.raises(SystemExit, match=r"4\.5 was not reached .* of speedrun"):
        row(4.5, END, [job(None), job(1.0, preset="gpt2-124m")], [job(1.0)])
    with pytest.raises(SystemExit, match=r"4\.5 was not reached .* of modded-nanogpt"):
        row(4.5, END, [job(1.0)], [job(None)])


def test_a_target_that_they_do_not_reach_has_their_lowest_loss() -> None:
    theirs = job(None, seconds=20.0, tokens=4_000_000)
    found = unreached(4.5, {"jobs": [job(8.0)], "beside": {"runs": [theirs]}})
    assert found[1] == "not reached: 5.000 after 1 of 20 s (10 steps)"
    assert found[2:] == ("**8.0 s, 2.0 M tokens (10 steps)**", "**below 0.40**", "below 0.50")
    with pytest.raises(SystemExit, match="reached by both"):
        unreached(4.5, {"jobs": [job(8.0)], "beside": {"runs": [job(9.0)]}})


@given(st.lists(st.floats(1, 1e3), min_size=1, max_size=5), st.floats(1, 1e3))
def test_settings_count_where_every_seed_reached_the_loss(times: list[float], other: float) -> None:
    jobs = [job(time, steps=10) for time in times] + [job(other, steps=20)]
    mean = sum(times) / len(times)
    found = best(jobs, 4.5)
    assert found is not None
    assert found.seconds == pytest.approx(min(mean, other))
    assert best([*jobs, job(None, steps=10)], 4.5) == Reached(other, 2e6, "20 steps", 1)


def test_settings_beside_the_steps_are_told() -> None:
    assert named(["train.steps=7", "train.cooldown=0.3"]) == "7 steps, `train.cooldown=0.3`"


def test_a_preset_with_plugins_of_its_own_is_another_kind() -> None:
    assert best([job(1.0, plugins="liger")], 4.5) is None


@given(st.floats(1, 1e3), st.floats(0.001, 0.5), st.floats(0, 1))
def test_validations_far_apart_tell_the_later_time(at: float, gap: float, share: float) -> None:
    times, losses = (at, at * (1 + gap)), (5.0, 4.0)
    curve = [{"seconds": t, "tokens": 1, "val_loss": v} for t, v in zip(times, losses, strict=True)]
    loss = 4.001 + 0.998 * share
    found = below(curve, loss)
    assert found is not None
    seconds, _ = found
    crossed = at * (1 + gap * (5.0 - loss))
    assert seconds == pytest.approx(crossed, abs=1e-3) or seconds == times[1]
    if gap < 0.09:
        assert seconds == pytest.approx(crossed, abs=1e-3)
    if gap > 0.2:
        assert seconds == times[1]
    assert below(curve, 3.9) is None
