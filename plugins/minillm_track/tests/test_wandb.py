"""The wandb plugin opens an offline run, and never logs a step below the last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from minillm_core import Ended, Evaluated, Rewound, Saved, Skipped, Started
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


def test_words_join_the_row_that_waits(fake, tell, step) -> None:
    """A skip is reported before the step that follows it: its number must not exceed that step's."""
    runs = fake("wandb")
    tell(WandB(), step(1), Skipped(3, 1), step(2), Saved(2, "c", 0.1), Ended(2, 0, 1.0))
    (run,) = runs
    assert [number for number, _ in run.rows] == [1, 2]
    assert run.rows[0][1]["events"].startswith("step 3: a batch")
    assert run.rows[1][1]["events"].splitlines() == [
        "step 2: checkpoint c (0.1 s)",
        "step 2: ended after 1 s, exit 0",
    ]


def test_the_words_of_a_row_stay_beside_an_evaluation(server, tell, step) -> None:
    events = [Saved(0, "a", 0.1), Evaluated(0, 4.0, None), step(1), Saved(1, "b", 0.1)]
    tell(WandB(), *events, Evaluated(1, 4.0, None), Saved(1, "c", 0.1), step(2))
    assert [row.get("events", "").count("checkpoint") for row in server.values()] == [1, 2, 0]


def test_online_no_step_is_dropped_after_a_rewind_and_a_resume(server, tell, step) -> None:
    rewound = [*map(step, (1, 2, 3, 4)), Saved(4, "c", 0.1), Rewound(4, 9.0, 1, 1)]
    tell(WandB(mode="online"), *rewound, *map(step, (2, 3, 4)))
    tell(WandB(mode="online"), step(4), Saved(4, "d", 0.1), step(5), Ended(5, 0, 1.0), resumed=3)
    assert [row["step"] for row in server.values()] == [1, 2, 3, 4, 2, 3, 4, 5]
    assert [line.split()[2] for line in server[8]["events"].splitlines()] == ["checkpoint", "ended"]
    tell(WandB(mode="online"), step(6), resumed=5)  # what the server has is not there again
    assert [row["step"] for row in server.values()][8:] == [6]


def test_online_a_resume_logs_what_a_kill_took(server, tell, step) -> None:
    tell(WandB(mode="online"), *map(step, (1, 2, 3, 4)))
    del server[3], server[4]
    tell(WandB(mode="online"), step(5), resumed=4)
    assert [row["step"] for row in server.values() if "step" in row] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("folder", ["lr=3e-4,s=1", "a:b;c#d?e'f%g\\h"])
def test_the_id_has_no_character_that_is_refused(fake, step, tmp_path: Path, folder: str) -> None:
    runs = fake("wandb")
    out = tmp_path / folder
    out.mkdir()
    plugin = WandB()
    for event in (Started("hash", 9, 1000, str(out), {}), step(1)):
        plugin.on_event(event)
    (run,) = runs
    stored = (out / "wandb.id").read_text().strip()
    assert run.asked["name"] == stored
    assert stored.startswith(folder)
    assert not set(run.asked["id"]) & set(":;,#?/'%\\")
    assert run.asked["id"][-9:] == stored[-9:]


def test_another_mode_is_refused() -> None:
    with pytest.raises(ValidationError, match="offline"):
        WandB(mode="disabled")  # type: ignore[arg-type]
