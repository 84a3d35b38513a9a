"""metrics.jsonl has the keys that others read, one event a line, at once."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from minillm_core.train.events import Ended, Evaluated, Saved, Stepped, Throughput
from minillm_core.train.metrics import Metrics, line


def stepped(step: int, **changes) -> Stepped:
    figures = {
        "step": step,
        "loss": 2.5,
        "lr": 0.001,
        "tokens": 100 * step,
        "tokens_per_second": Throughput(10.0, 12.0, 9.0),
        "step_seconds": 0.5,
        "mfu": None,
        "peak_bytes": None,
        "grad_norm": 1.0,
    }
    return Stepped(**(figures | changes))


def read(path: Path) -> list[dict]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_a_step_event_has_the_documented_keys() -> None:
    found = json.loads(line(stepped(3)))
    assert found == {
        "event": "step",
        "step": 3,
        "loss": 2.5,
        "lr": 0.001,
        "tokens": 300,
        "tokens_per_second": {"real": 10.0, "padded": 12.0, "supervised": 9.0},
        "step_seconds": 0.5,
        "mfu": None,
        "peak_bytes": None,
        "grad_norm": 1.0,
        "terms": {},
    }
    assert next(iter(found)) == "event"


def test_an_evaluation_has_the_documented_keys() -> None:
    found = json.loads(line(Evaluated(7, 3.25, None)))
    assert found == {"event": "eval", "step": 7, "val_loss": 3.25, "bits_per_byte": None}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null(value: float) -> None:
    found = json.loads(line(stepped(1, grad_norm=value, terms={"z": value, "y": 1.0})))
    assert found["grad_norm"] is None
    assert found["terms"] == {"z": None, "y": 1.0}


def test_each_event_is_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("left by somebody\n")
    with Metrics(path) as metrics:
        for n in range(1, 4):
            metrics(stepped(n))
            assert [event["step"] for event in read(path)] == list(range(1, n + 1))
            assert path.read_bytes().endswith(b"}\n")


@pytest.mark.parametrize(
    ("every", "last", "steps"),
    [(1, 4, [1, 2, 3, 4]), (3, 7, [1, 3, 6, 7]), (3, 6, [1, 3, 6]), (100, 2, [1, 2]), (5, 1, [1])],
)
def test_steps_between_lines(tmp_path: Path, every: int, last: int, steps: list[int]) -> None:
    path = tmp_path / "metrics.jsonl"
    with Metrics(path, every=every) as metrics:
        for n in range(1, last + 1):
            metrics(stepped(n))
        metrics(Saved(last, "checkpoints/x", 0.1))
        metrics(Ended(last, 0, 1.0))
    events = read(path)
    assert [event["step"] for event in events if event["event"] == "step"] == steps
    assert [event["event"] for event in events if event["event"] != "step"] == ["save", "end"]
    assert events[-1]["event"] == "end"
