"""Processes that compile together and train in turn, one at a time on each device, until a time.

While anybody compiles, nobody is timed: the first turn is given once all are ready, or after a while.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.card_job import DONE, OVER, READY, Share

__all__ = ["Turns", "visible"]

ENDING = 20.0  # seconds that a process has to end in


def visible(number: int) -> str:
    """The number-th of the GPUs that this process may see, by the name that its children know."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    return told.split(",")[number] if told else str(number)


class Child:
    """One set of plugins on one device."""

    def __init__(self, share: Share, device: int, name: str, *, reference: bool) -> None:
        self.share, self.device, self.name, self.reference = share, device, name, reference
        self.state = "waiting"  # compiling, ready, training, drawing, resting, ending, ended
        self.granted = 0.0
        self.dropped = False
        self.begun = False
        self.rested = False  # its runs at equal tokens are made
        self.process: subprocess.Popen[str] | None = None
        self.log = Path(share.folder) / f"{name.replace('+', 'with-')}.log"

    def start(self, heard: queue.Queue[tuple[Child, str | None]], threads: int) -> None:
        """Begin to compile."""
        command = (
            "import sys, json; from benchmarks.card_job import Share, main; "
            "main(Share.of(json.loads(sys.argv[1])), sys.argv[2])"
        )
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", command, json.dumps(self.share.data()), self.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={
                    "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
                    **os.environ,
                    "CUDA_VISIBLE_DEVICES": visible(self.device),
                },
            )
        self.state = "compiling"
        threading.Thread(target=self._listen, args=(heard,), daemon=True).start()

    def grant(self) -> None:
        """Let it train."""
        assert self.process is not None
        assert self.process.stdin is not None
        self.state = "drawing" if self.state == "resting" else "training"
        self.granted, self.begun = time.monotonic(), True
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        except OSError:  # it has just ended, and will be heard to
            pass

    def drop(self) -> None:
        """Ask it to end; finished runs are kept."""
        if self.process is None:
            self.state = "ended"
        elif self.process.poll() is None:
            self.dropped = True
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.terminate()

    def _listen(self, heard: queue.Queue[tuple[Child, str | None]]) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            heard.put((self, line.strip()))
        self.process.wait()
        heard.put((self, None))


class Turns:
    """Runs shares side by side, a device each.

    Args:
        shares: with the names of their variants, the reference first.
        seconds: after which everything is asked to end.
        patience: seconds after which the first turn is given though others still compile.
        ahead: processes on a device that have compiled and not trained yet, at most.
        reserve: for how many sets' runs time is kept, which the reference needs at the end; 0: for
            none, since somebody goes on later.
        say: prints a line.
    """

    def __init__(
        self,
        shares: Sequence[tuple[Share, Sequence[str]]],
        *,
        seconds: float,
        patience: float,
        ahead: int,
        reserve: float,
        say: Callable[[str], None],
    ) -> None:
        self.children = [
            Child(share, device, name, reference=not index)
            for device, (share, names) in enumerate(shares)
            for index, name in enumerate(names)
        ]
        self.devices = range(len(shares))
        self.ahead, self.reserve, self.say = ahead, reserve, say
        self.began = time.monotonic()
        self.deadline, self.patient = self.began + seconds, self.began + patience
        self.open = False  # turns are given
        self.took: list[float] = []  # seconds of runs
        self.failed: list[str] = []
        self.skipped: list[str] = []
        self.heard: queue.Queue[tuple[Child, str | None]] = queue.Queue()
        cores = os.cpu_count() or 1
        self.threads = max(1, cores // max(1, len(self.children)))

    def run(self) -> None:
        """Until all is made or the time is over: what is missing is in ``failed`` and ``skipped``."""
        with self._ended():
            while any(child.state != "ended" for child in self.children):
                if time.monotonic() > self.deadline:
                    self.skipped += [self._label(c) for c in self.children if c.state != "ended"]
                    return
                for device in self.devices:
                    self._next([child for child in self.children if child.device == device])
                try:
                    self._hear(*self.heard.get(timeout=0.5))
                except queue.Empty:
                    continue

    def _next(self, children: list[Child]) -> None:
        """Start who may compile, and give the next turn on a device."""
        busy = sum(
            child.state in ("compiling", "ready", "training", "drawing") for child in children
        )
        for child in [child for child in children if child.state == "waiting"]:
            if busy < self.ahead:
                child.start(self.heard, self.threads)
                busy += 1
        compiling = any(child.state == "compiling" for child in self.children)
        self.open = self.open or not compiling or time.monotonic() > self.patient
        if not self.open or any(child.state == "training" for child in children):
            return
        left = self.deadline - time.monotonic()
        for child in children:
            if child.state == "ready":
                needed = self.reserve and self._run * child.share.seeds * (1 + self.reserve)
                if not child.reference and not child.begun and left < needed:
                    self.say(f"{self._label(child)}: no time is left for it")
                    self.skipped.append(self._label(child))
                    child.state = "ended"
                    child.drop()
                    continue
                child.grant()
                return
        if all(child.reference or child.state in ("ending", "ended") for child in children):
            for child in children:
                if child.state == "resting":
                    child.grant()

    def _hear(self, child: Child, line: str | None) -> None:
        seconds = time.monotonic() - self.began
        if line is None:
            assert child.process is not None
            code = child.process.returncode
            if code and not child.dropped:
                self.failed.append(self._label(child))
                self.say(f"{self._label(child)}: exit {code}\n{_tail(child.log)}")
            child.state = "ended"
        elif line == READY:
            if child.state == "compiling":
                self.say(f"{seconds:6.1f} s  {self._label(child)}: compiled")
            child.state = "ready"
        elif line == OVER:
            child.state = "drawing"
            if not child.rested:  # later ones of the reference are of other lengths
                self.took.append(time.monotonic() - child.granted)
        elif line == DONE:
            self.say(f"{seconds:6.1f} s  {self._label(child)}: done")
            child.state = "resting" if child.reference and not child.rested else "ending"
            child.rested = True

    @property
    def _run(self) -> float:
        """Seconds of one run, as far as is known."""
        return fmean(self.took) if self.took else 0.0

    @contextmanager
    def _ended(self) -> Iterator[None]:
        """No process outlives the block."""
        try:
            yield
        finally:
            for child in self.children:
                child.drop()
            until = time.monotonic() + ENDING
            for child in self.children:
                if child.process is not None:
                    try:
                        child.process.wait(max(0.1, until - time.monotonic()))
                    except subprocess.TimeoutExpired:
                        child.process.kill()
                        child.process.wait()

    def _label(self, child: Child) -> str:
        return f"device {child.device}, {child.name}"


def _tail(log: Path, lines: int = 12) -> str:
    text: Any = log.read_text(errors="replace") if log.exists() else ""
    return "\n".join(text.splitlines()[-lines:])
