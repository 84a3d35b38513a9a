"""Tests of background saves: in order, one at a time, without losing errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from minillm_core import disk
from minillm_core.checkpoint.read import newest, newest_or_refuse
from minillm_core.checkpoint.writer import CheckpointWriter, Result
from minillm_core.errors import Interrupted, MinillmError, NonFinite

TIMEOUT = 20.0  # timeout in seconds of a test that waits for another thread


def state(value: float = 0.0) -> dict[str, np.ndarray]:
    return {"model.w": np.full((3, 4), value, np.float32), "state.n": np.asarray(1, np.int32)}


class Gate:
    """A snapshot that blocks until it is released."""

    def __init__(self) -> None:
        self.asked, self.open = threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None

    def __call__(self) -> dict[str, np.ndarray]:
        self.thread = threading.current_thread()
        self.asked.set()
        assert self.open.wait(TIMEOUT)
        return state()


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[CheckpointWriter]:
    with closing(CheckpointWriter(tmp_path, keep=2)) as writer:
        yield writer


def steps(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def test_a_save_is_in_the_background_and_told_once(
    tmp_path: Path, writer: CheckpointWriter
) -> None:
    gate = Gate()
    writer.submit(1, gate, {})
    assert gate.asked.wait(TIMEOUT)
    assert gate.thread is not threading.main_thread()
    assert writer.finished() == []
    gate.open.set()
    (result,) = writer.wait()
    assert result == Result(1, tmp_path / "checkpoints" / "step-00000001", result.seconds)
    assert result.seconds > 0
    assert writer.finished() == writer.wait() == []
    assert newest_or_refuse(tmp_path).step == 1


def test_saves_go_in_order_and_the_last_ones_are_kept(
    tmp_path: Path, writer: CheckpointWriter
) -> None:
    for step in range(1, 6):
        writer.submit(step, lambda step=step: state(step), {"step": step})
    assert [result.step for result in writer.wait()] == [1, 2, 3, 4, 5]
    assert steps(tmp_path) == ["step-00000004", "step-00000005"]
    found = newest_or_refuse(tmp_path)
    assert found.scalars == {"step": 5}
    assert found.arrays()["model.w"][0, 0] == 5


def test_the_next_save_waits_for_the_one_before(writer: CheckpointWriter) -> None:
    first, second = Gate(), Gate()
    second.open.set()
    writer.submit(1, first, {})
    waiting = threading.Thread(target=writer.submit, args=(2, second, {}))
    waiting.start()
    assert not second.asked.wait(0.05)
    assert waiting.is_alive()
    first.open.set()
    waiting.join(TIMEOUT)
    assert [result.step for result in writer.wait()] == [1, 2]


def test_scalars_are_those_of_the_moment(tmp_path: Path, writer: CheckpointWriter) -> None:
    gate, scalars = Gate(), {"cursor": {"row": 1, "files": [1, 2]}}
    writer.submit(1, gate, scalars)
    scalars["cursor"]["row"] = 2
    scalars["cursor"]["files"].append(3)
    gate.open.set()
    writer.wait()
    assert newest_or_refuse(tmp_path).scalars == {"cursor": {"row": 1, "files": [1, 2]}}


def test_what_json_cannot_hold_is_told_at_once(tmp_path: Path, writer: CheckpointWriter) -> None:
    with pytest.raises(ValueError, match="JSON"):
        writer.submit(1, state, {"loss": float("inf")})
    assert writer.wait() == []
    assert newest(tmp_path) is None


def raising(error: BaseException) -> Callable[[], dict[str, np.ndarray]]:
    def snapshot() -> dict[str, np.ndarray]:
        raise error

    return snapshot


@pytest.mark.parametrize(
    "error", [RuntimeError("lost"), SystemExit(0), KeyboardInterrupt(), GeneratorExit()]
)
def test_whatever_is_raised_becomes_a_result(
    tmp_path: Path, writer: CheckpointWriter, error: BaseException
) -> None:
    writer.submit(1, raising(error), {})
    writer.submit(2, state, {})
    bad, good = writer.wait()
    assert (bad.step, bad.path, bad.error) == (1, None, error)
    assert (good.step, good.error) == (2, None)
    assert steps(tmp_path) == ["step-00000002"]


def test_what_is_not_finite_becomes_a_result(writer: CheckpointWriter) -> None:
    writer.submit(1, lambda: state(np.nan), {})
    (result,) = writer.wait()
    assert isinstance(result.error, NonFinite)
    assert result.path is None


def test_a_full_disk_becomes_a_result_and_the_next_save_works(
    tmp_path: Path, writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.submit(1, state, {})
    writer.wait()

    def full(*_args) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write", full)
        writer.submit(2, state, {})
        (result,) = writer.wait()
    assert isinstance(result.error, MinillmError)
    assert "No space left" in str(result.error)
    assert steps(tmp_path) == ["step-00000001"]
    writer.submit(3, state, {})
    assert writer.wait()[0].error is None


def test_an_error_holds_no_arrays(writer: CheckpointWriter) -> None:
    held: list[weakref.ref] = []

    def snapshot() -> dict[str, np.ndarray]:
        arrays = state(np.inf)
        held.append(weakref.ref(arrays["model.w"]))
        return arrays

    writer.submit(1, snapshot, {})
    (result,) = writer.wait()
    assert result.error is not None
    assert held[0]() is None


def test_older_ones_that_cannot_be_removed_are_told(
    tmp_path: Path, writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        writer.submit(step, state, {})
    writer.wait()

    def refuse(*_args) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("shutil.rmtree", refuse)
    writer.submit(3, state, {})
    (result,) = writer.wait()
    assert result.path == tmp_path / "checkpoints" / "step-00000003"
    assert isinstance(result.error, MinillmError)
    assert "step 3 is written, but an older one could not be removed: Perm" in str(result.error)


def test_closing_waits_and_the_result_can_still_be_asked(tmp_path: Path) -> None:
    gate = Gate()
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.submit(1, gate, {})
    assert gate.asked.wait(TIMEOUT)
    threading.Timer(0.02, gate.open.set).start()
    writer.close()
    (result,) = writer.finished()
    assert result.error is None
    assert newest_or_refuse(tmp_path).step == 1
    with pytest.raises(RuntimeError, match="after shutdown"):
        writer.submit(2, state, {})


def test_an_interrupt_while_waiting_loses_nothing(tmp_path: Path, writer: CheckpointWriter) -> None:
    gate = Gate()
    writer.submit(1, gate, {})
    assert gate.asked.wait(TIMEOUT)
    timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))

    def interrupted() -> None:  # the signal may be faster than the wait
        timer.start()
        writer.wait()

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    timer.join()
    assert writer.finished() == []
    gate.open.set()
    assert [result.step for result in writer.wait()] == [1]
    assert newest_or_refuse(tmp_path).step == 1


def test_closing_now_gives_up_at_the_next_file(tmp_path: Path) -> None:
    gate = Gate()
    with closing(CheckpointWriter(tmp_path, keep=1)) as before:
        before.submit(1, state, {})
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.submit(2, gate, {})
    assert gate.asked.wait(TIMEOUT)
    writer.close(now=True)
    assert writer.finished() == []  # it was not waited for
    gate.open.set()
    (result,) = writer.wait()
    assert isinstance(result.error, Interrupted)
    assert steps(tmp_path) == ["step-00000001"]


def test_a_process_that_is_told_to_go_now_ends(tmp_path: Path) -> None:
    """Its thread is in the middle of a save, and a second Ctrl-C ends the program."""
    script = f"""
import threading
from pathlib import Path
import numpy as np
from minillm_core.checkpoint.writer import CheckpointWriter
going = threading.Event()
def snapshot():
    going.set()
    return {{"model.w": np.zeros((64, 64), np.float32)}}
writer = CheckpointWriter(Path({str(tmp_path)!r}), keep=1)
writer.submit(1, snapshot, {{}})
going.wait()
writer.close(now=True)
raise KeyboardInterrupt
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=TIMEOUT)
    assert done.returncode == -signal.SIGINT
    found = newest(tmp_path)
    assert found is None or found.step == 1
    assert not list(tmp_path.glob("checkpoints/*.tmp-*"))
