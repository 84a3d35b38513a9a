"""Tests of a run's saves: contents, and reports."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.backends.base import Snapshot
from minillm_core.checkpoint import layout
from minillm_core.checkpoint.writer import Result
from minillm_core.errors import DataError, MinillmError, NonFinite
from minillm_core.train.budget import Position
from minillm_core.train.checkpoints import Best, CheckpointManager
from minillm_core.train.events import Evaluated, Event, Saved, Unsaved

FULL = MinillmError("the disk is full", where="12 MB", fix="make room")


class Disk:
    """A writer whose saves are ended by the test."""

    def __init__(self, *errors: tuple[bool, BaseException | None]) -> None:
        self.errors = list(errors)
        self.submitted: list[tuple[int, dict[str, Any]]] = []
        self.results: list[Result] = []

    def submit(self, step: int, snapshot: Any, scalars: dict[str, Any], beside: Any) -> None:
        self.submitted.append((step, json.loads(json.dumps(scalars))))
        written, error = self.errors.pop(0)
        path = Path("out") / "checkpoints" / f"step-{step:08d}" if written else None
        self.results.append(Result(step, path, 0.5, error))

    def finished(self) -> list[Result]:
        results, self.results = self.results, []
        return results

    wait = finished


class Run(CheckpointManager):
    """The checkpoints of a run, with the resulting events and lines."""

    def __init__(self, disk: Any, *, note: str | None = None, on_error: str = "stop") -> None:
        self.events: list[Event] = []
        self.said: list[str] = []
        trainer: Any = SimpleNamespace(snapshot=lambda: Snapshot(dict, note))
        super().__init__(
            self.events.append,
            self.said.append,
            trainer=trainer,
            writer=disk,
            constants={"seed": 3},
            on_error=on_error,
            out=Path("out"),
        )


def test_a_save_holds_the_position_and_the_run() -> None:
    disk = Disk((True, None))
    run = Run(disk)
    position = Position(step=4, tokens=9, cursor={"epoch": 1}, guarded=(2,), losses=(0.1,))
    run.save(position)
    assert disk.submitted == [(4, {**position.data(), "seed": 3})]
    run.report(position)
    assert run.events == [Saved(4, "checkpoints/step-00000004", 0.5)]
    run.report(position, wait=True)
    assert len(run.events) == 1
    assert run.said == []


def test_what_a_snapshot_cost_is_said() -> None:
    run = Run(Disk((True, None)), note="training had to wait")
    run.save(Position(step=2))
    assert run.said == ["step 2: training had to wait"]


def test_what_could_not_be_removed_does_not_make_it_unsaved() -> None:
    run = Run(Disk((True, FULL)))
    run.save(Position(step=2))
    run.report(Position(step=2))
    assert [event.event for event in run.events] == ["save"]
    assert run.said[0].startswith("warning: the disk is full")


@pytest.mark.parametrize("error", [FULL, OSError("gone"), None])
def test_one_that_is_lost_ends_the_run_or_is_told(error: BaseException | None) -> None:
    run = Run(Disk((False, error)))
    run.save(Position(step=2))
    with pytest.raises(type(error or FULL)):
        run.report(Position(step=2))
    run = Run(Disk((False, error), (True, None)), on_error="continue")
    run.save(Position(step=2))
    run.save(Position(step=3))
    run.report(Position(step=3), wait=True)
    lost, saved = run.events
    assert isinstance(lost, Unsaved)
    assert isinstance(saved, Saved)
    assert (lost.step, saved.step) == (2, 3)
    assert lost.reason == str(error or "the checkpoint of step 2 is lost")


def test_a_state_that_is_not_finite_ends_the_run_in_any_case() -> None:
    run = Run(Disk((False, NonFinite("a weight is nan"))), on_error="continue")
    run.save(Position(step=2))
    with pytest.raises(NonFinite):
        run.report(Position(step=2), wait=True)


def test_what_was_saved_before_an_error_is_told_first() -> None:
    run = Run(Disk((True, None), (False, FULL)))
    run.save(Position(step=2))
    run.save(Position(step=3))
    with pytest.raises(MinillmError, match="full"):
        run.report(Position(step=3), wait=True)
    (first,) = run.events
    assert isinstance(first, Saved)
    assert first.step == 2


def test_a_best_checkpoint_that_was_not_written_is_not_the_best(tmp_path: Path) -> None:
    best = Best(tmp_path)
    assert best.update_if_better(Evaluated(100, 3.5, None, 10))
    layout.folder(tmp_path, 100).mkdir(parents=True)
    best.mark()
    assert best.update_if_better(Evaluated(300, 3.0, None, 10))
    best.lost(300)
    assert best.update_if_better(Evaluated(400, 3.1, None, 10))
    assert best.protected() == {100, 400}


def test_after_a_rewind_the_best_of_those_that_are_left_is_the_best(tmp_path: Path) -> None:
    evaluated = [Evaluated(5, 3.5, None, 10), Evaluated(10, 3.6, None, 10)]
    for one in (*evaluated, Evaluated(15, 3.0, None, 10)):
        layout.folder(tmp_path, one.step).mkdir(parents=True)
    best = Best(tmp_path, evaluated)
    assert best.update_if_better(Evaluated(15, 3.0, None, 10))
    best.mark()
    layout.folder(tmp_path, 15).rmdir()
    best.forget(after=10)
    assert best.protected() == {5}
    assert not best.update_if_better(Evaluated(20, 3.55, None, 10))


COUNTS = st.integers(0, 2**53)


@given(
    step=COUNTS,
    tokens=COUNTS,
    elapsed=st.floats(0, 1e9),
    skipped=COUNTS,
    guarded=st.lists(COUNTS, max_size=9).map(tuple),
    losses=st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=9).map(tuple),
    rewinds=st.integers(0, 9),
    before=COUNTS,
)
def test_a_position_comes_back_from_json_to_the_bit(**fields: Any) -> None:
    position = Position(**fields, cursor={"epoch": 0, "offset": 3})
    again = Position.of(json.loads(json.dumps(position.data())))
    assert again == Position(**{**vars(position), "saved": position.step})


@pytest.mark.parametrize("missing", sorted(Position().data().keys() - {"tokens_before"}))
def test_half_a_position_is_none(missing: str) -> None:
    data = Position().data()
    del data[missing]
    with pytest.raises(KeyError, match=missing):
        Position.of(data)


@given(every=st.integers(1, 40), back=st.integers(1, 60), keep=st.integers(1, 4))
def test_a_checkpoint_that_is_old_enough_to_rewind_to_is_kept(
    every: int, back: int, keep: int
) -> None:
    manager, there = CheckpointManager(back=back), list[int]()
    for step in range(every, 12 * max(every, back), every):
        there.insert(0, step)
        kept = manager.to_rewind_to(there)
        assert len(kept) <= 3
        there = [one for place, one in enumerate(there) if place < keep or one in kept]
        assert step < 3 * max(every, back) or any(one <= step - back for one in there)


def test_nothing_is_saved_once_the_data_have_changed() -> None:
    def changed() -> None:
        raise DataError("the file was written to", where="a.bin")

    disk: Any = Disk()
    trainer: Any = SimpleNamespace(snapshot=lambda: pytest.fail("a snapshot was taken"))
    checkpoints = CheckpointManager(print, print, changed, trainer=trainer, writer=disk)
    with pytest.raises(DataError, match="written to"):
        checkpoints.save(Position(step=4))
    assert disk.submitted == []


def test_other_ranks_bring_their_parts_when_rank_0_saves() -> None:
    """They have no writer, and learn only from rank 0 whether a save is due."""
    taken, answers = [], iter([True, False, True])

    def snapshot() -> Snapshot:
        taken.append(True)
        return Snapshot(dict)

    trainer: Any = SimpleNamespace(snapshot=snapshot)
    ranks: Any = SimpleNamespace(broadcast=lambda due: next(answers), shard="updates")
    other = CheckpointManager(trainer=trainer, ranks=ranks)
    other.save(Position(step=4))
    other.evaluated(Position(step=6), Evaluated(6, 1.0, None, 10))
    assert len(taken) == 1
    other.evaluated(Position(step=8), Evaluated(8, 1.0, None, 10))  # rank 0 keeps the best
    assert len(taken) == 2
