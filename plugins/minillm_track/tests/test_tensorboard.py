"""TensorBoard's own reader finds the logged entries in the files, each step once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minillm_core import Ended, Evaluated, Rewound, Saved
from minillm_track.tensorboard import TensorBoard

pytest.importorskip("tensorboard")


@pytest.fixture
def shown(tmp_path: Path) -> Callable[[], Any]:
    """Read the run's folder with TensorBoard's own reader."""

    def read(folder: str = "tensorboard") -> Any:
        from tensorboard.backend.event_processing import plugin_event_accumulator as reading

        found = reading.EventAccumulator(str(tmp_path / "runs" / "one" / folder))
        found.Reload()
        return found

    return read


def steps(shown: Any, tag: str) -> list[int]:
    return [entry.step for entry in shown.Tensors(tag)]


def text(shown: Any, kind: str) -> str:
    (entry,) = shown.Tensors(f"events/{kind}")
    return entry.tensor_proto.string_val[0].decode()


def test_figures_words_and_settings_are_there(tell, step, shown) -> None:
    events = [step(1), step(2), Evaluated(2, 4.0, 1.5), Saved(2, "c", 0.1), Ended(2, 0, 2.0)]
    tell(TensorBoard(), *events)
    found = shown()
    assert steps(found, "train/loss") == [1, 2]
    assert found.Tensors("train/loss")[1].tensor_proto.float_val[0] == 8.0
    assert steps(found, "val/loss") == [2]
    assert text(found, "save") == "checkpoint c (0.1 s)"
    assert text(found, "end") == "ended after 2 s, exit 0"
    assert "_hparams_/session_start_info" in found.summary_metadata
    assert b"train.lr" in found.PluginTagToContent("hparams")["_hparams_/session_start_info"]


def test_a_resumed_run_goes_on_and_no_step_is_there_twice(tell, step, shown) -> None:
    tell(TensorBoard(), *map(step, (1, 2, 3, 4)), Ended(4, 75, 1.0))
    tell(TensorBoard(), *map(step, (3, 4, 5)), Ended(5, 0, 1.0), resumed=2)
    found = shown()
    assert steps(found, "train/loss") == [1, 2, 3, 4, 5]
    assert text(found, "resume") == "resumed from checkpoints/step-2"


def test_a_spike_takes_back_what_came_after_the_checkpoint(tell, step, shown) -> None:
    events = [step(1), step(2), step(3), Rewound(3, 9.0, 1, 1), step(2), step(3), Ended(3, 0, 1.0)]
    tell(TensorBoard(), *events)
    assert steps(shown(), "train/loss") == [1, 2, 3]


def test_the_folder_is_an_option(tell, step, shown) -> None:
    tell(TensorBoard(folder="tb"), step(1), Ended(1, 0, 1.0))
    assert steps(shown("tb"), "train/lr") == [1]


@pytest.mark.slow
def test_a_run_that_is_resumed_by_the_program(tmp_path: Path, shown: Callable[[], Any]) -> None:
    from minillm_core.cli.main import main

    data = tmp_path / "text.txt"
    data.write_text("\n\n".join(f"the {n} little cats sat on mat {n * n}" for n in range(400)))
    out = tmp_path / "runs" / "one"
    small = ("model.vocab=300", "model.dim=32", "model.layers=1", "train.rows=2")
    sizes = (
        "train.seq_len=16",
        "eval.tokens=64",
        "eval.samples=0",
        "log.every=2",
        "tensorboard.flush_seconds=5",
    )
    where = ("--data", str(data), "--device", "cpu", "--out", str(out))
    asked = ("--preset", "tiny", "--plugins", "tensorboard", "--steps", "4")
    assert main(["train", *asked, *where, *small, *sizes]) == 0
    assert main(["train", "--resume", "--out", str(out), "--steps", "7"]) == 0
    found = shown()
    logged = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps(found, "train/loss") == [e["step"] for e in logged if e["event"] == "step"]
    assert steps(found, "val/loss") == [e["step"] for e in logged if e["event"] == "eval"]
    settings = found.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    assert b"tensorboard.flush_seconds" in settings  # an option that was given
