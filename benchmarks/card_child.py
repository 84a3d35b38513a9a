"""The process of one plugin set on one device: its state, and its messages."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path

from benchmarks.card_job import DONE, OVER, READY, Share

__all__ = ["Child", "Heard", "State", "visible"]


class State(Enum):
    """The state of a child, in chronological order."""

    WAITING = auto()  # not started
    COMPILING = auto()
    READY = auto()  # ready for a run
    TRAINING = auto()  # has the turn
    DRAWING = auto()  # draws initial values, on the host
    RESTING = auto()  # the reference, until all others are finished
    ENDING = auto()
    ENDED = auto()


BUSY = {State.COMPILING, State.READY, State.TRAINING, State.DRAWING}
"""States with a trainer on the device, present or imminent."""


class Child:
    """One plugin set on one device."""

    def __init__(self, share: Share, device: int, name: str, *, reference: bool) -> None:
        self.share, self.device, self.name, self.reference = share, device, name, reference
        self.state = State.WAITING
        self.granted = 0.0  # when it was given the turn
        self.begun = False  # has had a turn
        self.dropped = False
        self.rested = False  # its runs at equal tokens are finished
        self.process: subprocess.Popen[str] | None = None
        self.log = Path(share.folder) / f"{name.replace('+', 'with-')}.log"

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"device {self.device}, {self.name}"

    @property
    def busy(self) -> bool:
        """Whether it counts towards a device's limit of processes."""
        return self.state in BUSY

    @property
    def over(self) -> bool:
        """Whether it has finished."""
        return self.state in (State.ENDING, State.ENDED)

    def start(self, heard: Heard, threads: int) -> None:
        """Start compiling; its messages are put into ``heard``."""
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "benchmarks.card_job"),
                    *(json.dumps(self.share.data()), self.name),
                ],
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
        self.state = State.COMPILING
        threading.Thread(target=self._listen, args=(heard,), daemon=True).start()

    def grant(self) -> None:
        """Give it the turn; a resting reference first draws initial values."""
        assert self.process is not None
        assert self.process.stdin is not None
        self.state = State.DRAWING if self.state is State.RESTING else State.TRAINING
        self.granted, self.begun = time.monotonic(), True
        with suppress(OSError):  # it has just ended, which is reported separately
            self.process.stdin.write("go\n")
            self.process.stdin.flush()

    def take(self, word: str | None) -> None:
        """Process a message; None: the process has ended. Any other text is ignored."""
        if word is None:
            self.state = State.ENDED
        elif word == READY:
            self.state = State.READY
        elif word == OVER:
            self.state = State.DRAWING
        elif word == DONE:
            rests = self.reference and not self.rested
            self.state, self.rested = State.RESTING if rests else State.ENDING, True

    def drop(self) -> None:
        """Ask it to exit; finished runs are kept."""
        if self.process is None:
            self.state = State.ENDED
        elif self.process.poll() is None:
            self.dropped = True
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.terminate()

    def end(self, until: float) -> None:
        """Wait for its exit, until a time of the monotonic clock."""
        if self.process is not None:
            try:
                self.process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    @property
    def failure(self) -> str | None:
        """Return how a finished process failed, with the end of its log; None: it did not."""
        code = self.process.returncode if self.process else 0
        if not code or self.dropped:
            return None
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join([f"exit {code}", *text.splitlines()[-12:]])

    def _listen(self, heard: Heard) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            heard.put((self, line.strip()))
        self.process.wait()
        heard.put((self, None))


Heard = queue.Queue[tuple[Child, str | None]]
"""Messages and their senders, in order; None: the process has ended."""


def visible(number: int) -> str:
    """Return the number-th GPU visible to this process, under its name for child processes."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    return told.split(",")[number] if told else str(number)
