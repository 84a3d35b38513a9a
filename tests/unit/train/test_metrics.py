"""Tests that metrics.jsonl has the documented keys, one event per line, written immediately."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core.errors import MinillmError, Refusal
from minillm_core.train.events import (
    Ended,
    Evaluated,
    Rewound,
    Saved,
    Started,
    Stepped,
    Throughput,
)
from minillm_core.train.metrics import Metrics, add, events, line, truncate


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
def test_a_full_disk_is_named() -> None:
    with Metrics(Path("/dev/full")) as metrics, pytest.raises(MinillmError) as error:
        metrics(stepped(1))
    assert "full could not be written: No space left" in str(error.value)


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
    found = json.loads(line(Evaluated(7, 3.25, None, 128)))
    assert found.pop("tokens") == 128
    assert found == {"event": "eval", "step": 7, "val_loss": 3.25, "bits_per_byte": None}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null(value: float) -> None:
    found = json.loads(line(stepped(1, grad_norm=value, terms={"z": value, "y": 1.0})))
    assert found["grad_norm"] is None
    assert found["terms"] == {"z": None, "y": 1.0}


def test_each_event_is_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(stepped(1)))
    with Metrics(path) as metrics:
        for n in range(2, 5):
            metrics(stepped(n))
            assert [event["step"] for event in read(path)] == list(range(1, n + 1))
            assert path.read_bytes().endswith(b"}\n")


@settings(max_examples=60, deadline=None)
@given(
    steps=st.integers(0, 8),
    cut_at=st.integers(0, 9),
    torn=st.sampled_from([b"", b'{"event": "st', b"\xff\xfe", b"[1]\n", b"7", b"{}"]),
)
def test_a_cut_leaves_each_step_once(
    tmp_path_factory: pytest.TempPathFactory, steps: int, cut_at: int, torn: bytes
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    with Metrics(path) as metrics:
        metrics(Started("hash", 9, 1))
        for n in range(1, steps + 1):
            metrics(stepped(n))
            if n % 2 == 0:
                metrics(Evaluated(n, 1.0, None))
            if n > 2:
                metrics(Saved(n - 2, "x", 0.1))  # reported late: it was written in the background
        metrics(Ended(steps, 75, 1.0))
    with path.open("ab") as file:
        file.write(torn)
    kept = truncate(path, cut_at)
    assert kept == read(path)
    last = min(cut_at, steps)
    assert [e["step"] for e in kept if e["event"] == "step"] == list(range(1, last + 1))
    assert [e["step"] for e in kept if e["event"] == "eval"] == list(range(2, last + 1, 2))
    assert all(e.get("step", 0) <= cut_at for e in kept)
    assert [e["event"] for e in kept if "step" not in e] == ["run"]
    assert "end" not in {e["event"] for e in kept}
    assert truncate(path, cut_at) == kept


def test_nothing_to_cut(tmp_path: Path) -> None:
    assert truncate(tmp_path / "metrics.jsonl", 3) == []
    assert list(tmp_path.iterdir()) == []


def test_a_rewind_takes_back_what_came_after(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Metrics(path, every=4) as metrics:
        for n in range(1, 7):
            metrics(stepped(n))
        metrics(Rewound(6, 9.0, 4, 200))
        for n in range(5, 8):
            metrics(stepped(n))
        metrics(Ended(7, 0, 1.0))
    assert [(e["event"], e["step"]) for e in read(path)] == [
        *[("step", 1), ("step", 4), ("rewind", 6), ("step", 7), ("end", 7)]
    ]
    # a checkpoint of step 5 was saved while rewinding; that of step 4 leads to the spike again
    assert [e["event"] for e in truncate(path, 5)] == ["step", "step", "rewind"]
    assert [e["event"] for e in truncate(path, 4)] == ["step", "step"]


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


def test_a_very_long_file_is_cut_whole_and_held_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minillm_core.train.metrics.MOST", 10)
    path = tmp_path / "metrics.jsonl"
    with Metrics(path) as metrics:
        for n in range(1, 101):
            metrics(stepped(n))
        metrics(Evaluated(100, 1.0, None))
    found = truncate(path, 100)
    assert len(read(path)) == 101
    assert len(found) < 13
    assert [event["event"] for event in found[-2:]] == ["step", "eval"]
    assert found[-2]["step"] == 100


@pytest.mark.parametrize(
    "torn",
    [
        b'{"event": "step", "step": 1, "loss": Infinity}\n',
        b'{"event": "step", "step": 1, "tokens": ' + b"9" * 400 + b"}\n",
        b"[" * 100_000 + b"\n",
        b'{"event": "step", "step": 1, "step": 1}\n',
    ],
)
def test_what_no_run_writes_is_no_event(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(torn + line(stepped(2)))
    assert [event["step"] for event in truncate(path, 9)] == [2]


def test_a_line_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 31)  # a sparse file: it takes no space, and has no line
    with pytest.raises(Refusal, match="a line of more than"):
        truncate(path, 1)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_judge_s_figures_stand_behind_the_run_s_own_and_survive_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    torn = b'{"event": "step", "step": 2, "lo'
    path.write_bytes(b'{"event": "eval", "step": 1, "val_loss": 2.0}\n' + torn)
    add(path, {"event": "judged", "step": 1, "figures": {"acc": float("nan")}})
    add(path, {"event": "judged", "step": 9, "figures": {}})
    found = [event for _, event in events(path)]
    assert [one and (one["event"], one["step"]) for one in found] == [
        ("eval", 1),
        None,
        ("judged", 1),
        ("judged", 9),
    ]
    assert [one["step"] for one in truncate(path, 3)] == [1, 1]
    assert b"NaN" not in path.read_bytes()
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        add(link, {"event": "judged"})
    with pytest.raises(FileNotFoundError):
        add(tmp_path / "none.jsonl", {"event": "judged"})
    assert not (tmp_path / "none.jsonl").exists()
