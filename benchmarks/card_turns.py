"""Processes that compile concurrently and train in turns, one at a time per device, until a deadline.

No run is timed while another process compiles on its device: a number of processes compile, then all of them
train, then the next ones compile. The first turn of each wave is given once all are ready, or after a while; a
process that still compiles when all others have trained does not hold up the next wave.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean

from benchmarks.card_child import Child, Heard, State
from benchmarks.card_job import DONE, OVER, READY, Share

__all__ = ["Turns"]

ENDING = 20.0  # seconds that a process has to exit


class Turns:
    """A runner of shares, one device each.

    Args:
        shares: with the names of their variants, the reference first.
        seconds: time limit; processes that still run then get SIGTERM.
        patience: seconds after which a wave's first turn is given even if others still compile.
        ahead: number of processes of a wave on a device; all have memory there.
        reserve: number of sets' runs for which time is reserved, for the reference at the end; 0:
            none, since a later call continues.
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
        self.deadline, self.patience = self.began + seconds, patience
        self.waves = dict.fromkeys(self.devices, self.began)  # device -> when its wave was started
        self.took: list[float] = []  # seconds per run
        self.failed: list[str] = []
        self.skipped: list[str] = []
        self.heard: Heard = queue.Queue()
        cores = os.cpu_count() or 1
        self.threads = max(1, cores // max(1, len(self.children)))

    def run(self) -> None:
        """Run until everything is finished or the deadline; missing sets are in ``failed`` and ``skipped``."""
        with self._ended():
            while left := [child for child in self.children if child.state is not State.ENDED]:
                if time.monotonic() > self.deadline:
                    self.skipped += [child.label for child in left]
                    return
                for device in self.devices:
                    self._next([child for child in self.children if child.device == device])
                try:
                    self._hear(*self.heard.get(timeout=0.5))
                except queue.Empty:
                    continue

    def _next(self, children: list[Child]) -> None:
        """Start the next wave of processes, or give the next turn on a device."""
        device, now = children[0].device, time.monotonic()
        patient = now < self.waves[device] + self.patience
        late = [one for one in children if one.state is State.COMPILING and not patient]
        waiting = [child for child in children if child.state is State.WAITING]
        if waiting and not any(child.busy for child in children if child not in late):
            self.waves[device] = now
            for child in late:
                self.say(f"{child.label}: still compiles; the next ones start")
            for child in waiting[: self.ahead]:
                child.start(self.heard, self.threads)
        compiling = any(child.state is State.COMPILING for child in children)
        patient = now < self.waves[device] + self.patience
        if (compiling and patient) or any(child.state is State.TRAINING for child in children):
            return
        for child in children:
            if child.state is State.READY:
                if self._has_time(child):
                    child.grant()
                    return
                self.say(f"{child.label}: no time is left for it")
                self.skipped.append(child.label)
                child.state = State.ENDED
                child.drop()
        if all(child.reference or child.over for child in children):
            for child in children:
                if child.state is State.RESTING:
                    child.grant()

    def _has_time(self, child: Child) -> bool:
        """Return whether all its runs can be finished, and the reference's after them."""
        if child.reference or child.begun or not self.reserve:
            return True
        run = fmean(self.took) if self.took else 0.0
        return self.deadline - time.monotonic() >= run * child.share.seeds * (1 + self.reserve)

    def _hear(self, child: Child, word: str | None) -> None:
        compiled = word == READY and child.state is State.COMPILING
        if word == OVER and not child.rested:  # later runs of the reference have other lengths
            self.took.append(time.monotonic() - child.granted)
        child.take(word)
        if word is None and (failure := child.failure):
            self.failed.append(child.label)
            self.say(f"{child.label}: {failure}")
        if compiled or word == DONE:
            told = "compiled" if compiled else "done"
            self.say(f"{time.monotonic() - self.began:6.1f} s  {child.label}: {told}")

    @contextmanager
    def _ended(self) -> Iterator[None]:
        """End all child processes on exit from the block."""
        try:
            yield
        finally:
            for child in self.children:
                child.drop()
            until = time.monotonic() + ENDING
            for child in self.children:
                child.end(until)
