"""Heartbeats: no report while every process's counter advances; a process whose counter stops is named."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from minillm_core import BackendError, MinillmError
from minillm_core.backends.ranks import join
from minillm_core.inspection import Detected
from minillm_mesh.heartbeat import Watch, meet


class Shared:
    """A store in one process."""

    def __init__(self) -> None:
        self.counts, self.lock = Counter[str](), threading.Lock()

    def add(self, key: str, value: int, /) -> int:
        with self.lock:
            self.counts[key] += value
            return self.counts[key]


def test_processes_that_live_leave_each_other_alone() -> None:
    store = Shared()
    watches = [Watch(store, rank, 3, patience=0.5, every=0.02) for rank in range(3)]
    time.sleep(1.0)
    for watch in watches:
        watch.close()
    assert {*store.counts} == {"alive/0", "alive/1", "alive/2"}
    assert min(store.counts.values()) > 5


LOST = """
import time
from test_heartbeat import Shared, Watch
Watch(Shared(), 0, 3, patience=0.3, every=0.02)
time.sleep(60)
"""


STOOD = """
import time
from test_heartbeat import Shared, Watch
store = Shared()
watches = [Watch(store, rank, 3, patience=0.5, every=0.02) for rank in range(3)]
time.sleep(0.2)
with store.lock:
    time.sleep(1.0)
time.sleep(0.2)
for watch in watches:
    watch.close()
"""


def ended(code: str) -> subprocess.CompletedProcess[str]:
    """Run a watch in a process, which it ends."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.mark.slow
def test_processes_that_stood_still_together_leave_each_other_alone() -> None:
    """A suspended machine, or a store that does not respond, for longer than the patience."""
    done = ended(STOOD)
    assert done.returncode == 0, done.stderr


def test_a_process_that_is_lost_is_named() -> None:
    done = ended(LOST)
    assert done.returncode == 1
    assert "rank 0: rank 1 and rank 2 have not answered for 0 s" in done.stderr
    assert "--resume" in done.stderr


def test_a_store_that_is_closed_ends_the_watch() -> None:
    class Closed(Shared):
        def add(self, key: str, value: int, /) -> int:
            raise ConnectionError

    watch = Watch(Closed(), 0, 2, patience=0.1, every=0.01)
    time.sleep(0.3)
    watch.close()


def test_all_meet_or_those_that_are_missing_are_named() -> None:
    store = Shared()
    others = [threading.Timer(0.1 * n, meet, (store, n, 3)) for n in (1, 2)]
    for one in others:
        one.start()
    meet(store, 0, 3)
    assert store.counts == {"here/0": 1, "here/1": 1, "here/2": 1}
    store = Shared()
    store.add("here/2", 1)
    with pytest.raises(MinillmError, match="rank 1 and rank 3 did not join within 0 s"):
        meet(store, 0, 4, patience=0.1)


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_processes_that_are_not_told_where_to_meet_are_refused(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(BackendError, match=f"but {missing}, the .* meet, is not") as caught:
        join(Detected("torch", "cpu", "named"))
    assert "torchrun" in (caught.value.fix or "")
