"""Trainers in children of a process that has imported everything and computed nothing.

Starting Python with torch takes seconds, a fork milliseconds. A framework that has computed, or
a thread, does not survive a fork: MLX hangs. So the parent only forks and compares.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

__all__ = ["Child", "fork", "import_all", "modules_of"]


class Child:
    """A forked process.

    Attributes:
        pid: its process id.
        began: time of the fork, by :func:`time.perf_counter`.
        code: its exit code, minus the signal's number if it was killed; None until known.
    """

    def __init__(self, pid: int) -> None:
        self.pid, self.began = pid, time.perf_counter()
        self.code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def wait(self, seconds: float = 120.0) -> int:
        """Wait for its exit.

        Raises:
            TimeoutError: it hangs; it is killed.
        """
        began = time.perf_counter()
        while (code := self.poll()) is None:
            waited = time.perf_counter() - began
            if waited > seconds:
                self.kill()
                raise TimeoutError(f"a child still ran after {seconds:.0f} s")
            time.sleep(min(0.001 + waited / 50, 0.05))  # longer where a child hangs
        return code

    def wait_until(self, moment: float) -> int | None:
        """Wait for its exit, at most until ``moment`` seconds after its start."""
        while (code := self.poll()) is None and time.perf_counter() < self.began + moment:
            time.sleep(0.0005)
        return code

    def kill(self) -> int:
        """Send SIGKILL; return the exit code, which shows whether it had ended before."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        return self.wait()


def fork(run: Callable[[], int], log: Path) -> Child:
    """Run a function in a child; its output is appended to ``log``, and its return value is the exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Child(pid)
    code = 70
    try:
        handle = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def modules_of(path: Path) -> None:
    """Write the names of the modules imported in this process."""
    path.write_text(json.dumps(sorted(sys.modules)))


def import_all(names: Iterable[str]) -> None:
    """Import the modules that a child has imported, so that later children need not.

    Raises:
        RuntimeError: an import started a thread, so that forks are not safe.
    """
    for name in names:
        if name not in sys.modules and name != "__mp_main__":
            # some entries of sys.modules cannot be imported by name
            with suppress(Exception):
                importlib.import_module(name)
    gc.freeze()  # a child need neither walk over what is there, nor copy its pages
    tasks = Path("/proc/self/task")
    threads = len(list(tasks.iterdir())) if tasks.exists() else 1
    if threads > 1:
        raise RuntimeError(f"importing started {threads - 1} threads: children could hang")
