"""The wandb plugin opens an offline run, and never logs a step below the last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from minillm_core import Ended, Evaluated, Rewound, Saved, Skipped
from minillm_track.wandb import WandB


def test_it_is_offline_in_the_run_s_folder(fake, tell, step, tmp_path: Path) -> None:
    (runs,) = [fake("wandb")]
    tell(WandB(), step(1), Ended(1, 0, 1.0))
    (run,) = runs
    out = tmp_path / "runs" / "one"
    assert run.asked["mode"] == "offline"
    assert run.asked["resume"] is None
    assert run.asked["dir"] == str(out)
    assert run.asked["id"] == run.asked["name"] == (out / "wandb.id").read_text().strip()
    assert run.asked["config"]["train.betas"] == "[0.9, 0.95]"
    assert vars(run.asked["settings"])["console"] == "off"
    assert run.axis == ("*", "step")
    assert run.code == 0


def test_online_is_asked_for_and_resumes_by_its_id(fake, tell, step) -> None:
    runs = fake("wandb")
    tell(WandB(mode="online", entity="us", project="p"), step(1))
    tell(WandB(mode="online", entity="us", project="p"), step(2), resumed=1)
    first, second = (run.asked for run in runs)
    assert first["id"] == second["id"]
    assert (second["mode"], second["resume"]) == ("online", "allow")
    assert (second["entity"], second["project"]) == ("us", "p")


def test_no_number_is_below_the_last_and_the_step_is_the_run_s(
    fake: Callable, tell: Callable, step: Callable
) -> None:
    runs = fake("wandb")
    events = [step(1), step(2), Evaluated(2, 4.0, 1.5), step(3), Rewound(3, 9.0, 1, 1)]
    tell(WandB(), *events, step(2), step(3), step(4), Ended(4, 1, 1.0))
    (run,) = runs
    numbers = [number for number, _ in run.rows]
    assert numbers == sorted(numbers)
    assert len({(n, row["step"]) for n, row in run.rows}) == 6  # an evaluation shares its step's
    assert [row["step"] for _, row in run.rows] == [1, 2, 2, 3, 2, 3, 4]
    assert run.code == 1


def test_words_wait_for_the_next_row(fake, tell, step) -> None:
    """A skip is reported before the step that follows it: its number must not exceed that step's."""
    runs = fake("wandb")
    tell(WandB(), step(1), Skipped(3, 1), step(2), Saved(2, "c", 0.1), Ended(2, 0, 1.0))
    (run,) = runs
    assert [number for number, _ in run.rows] == [1, 2]
    assert run.rows[1][1]["events"].startswith("step 3: a batch")


def test_another_mode_is_refused() -> None:
    with pytest.raises(ValidationError, match="offline"):
        WandB(mode="disabled")  # type: ignore[arg-type]
