"""The trackio plugin opens a local run, and continues it under the same name."""

from __future__ import annotations

from minillm_core import Ended, Evaluated, Rewound, Saved
from minillm_track.trackio import Trackio


def test_figures_words_and_settings_go_to_a_local_run(fake, tell, step, capsys) -> None:
    runs = fake("trackio")
    events = [step(1), Evaluated(1, 4.0, None), Saved(1, "c", 0.1), Rewound(2, 9.0, 1, 1)]
    tell(Trackio(project="p"), *events, step(2), Ended(2, 0, 2.0))
    (run,) = runs
    asked = run.asked
    assert {"space_id", "server_url"} & set(asked) == set()
    assert (asked["project"], asked["resume"]) == ("p", "allow")
    assert (asked["embed"], asked["auto_log_gpu"], asked["auto_log_cpu"]) == (False,) * 3
    assert asked["config"]["train.lr"] == 0.1
    assert [number for number, _ in run.rows] == [1, 1, 1, 1, 2, 2]
    assert run.rows[0][1]["train/loss"] == 9.0
    assert run.rows[1][1] == {"val/loss": 4.0}
    assert run.rows[2][1] == {"events": "checkpoint c (0.1 s)"}
    assert run.code == 0
    assert capsys.readouterr().out == ""  # stdout is for the command's results


def test_a_resumed_run_takes_the_place_of_what_there_is_under_its_name(fake, tell, step) -> None:
    runs = fake("trackio")
    tell(Trackio(), step(1))
    before = runs[0].asked["name"]
    tell(Trackio(), step(2), resumed=1)
    (run,) = runs
    assert run.asked["name"] == before
