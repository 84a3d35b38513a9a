"""Heartbeats between the processes of a run, independent of the collectives.

A collective that waits for a missing process reports no error. So each process increments a counter once
a second in the rendezvous store and reads the others' counters: a process whose counter stops is named,
and the run ends. Heartbeats come from a thread: a stopped or lost process is named; one whose code hangs is
not, unless it holds Python's global lock.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from minillm_core import MinillmError

PATIENCE = 25.0
"""Seconds of polling without a heartbeat after which a process counts as lost.

A launcher gives a stopped process another thirty, and the run must end within a minute.
"""

EVERY = 1.0
"""Seconds between two heartbeats."""

JOINING = 600.0
"""Rendezvous timeout in seconds; each process first imports a framework, possibly over a network."""


class Store(Protocol):
    """A key-value store shared by all processes."""

    def add(self, key: str, value: int, /) -> int:
        """Add to a counter, initially 0, and return its value."""
        ...


def meet(
    store: Store, rank: int, size: int, *, patience: float = JOINING, every: float = 0.05
) -> None:
    """Wait for all processes, polling in Python: torch's own wait does not react to a launcher's signals.

    Args:
        store: shared by all.
        rank: of this process.
        size: number of processes.
        patience: timeout in seconds.
        every: seconds between two polls.

    Raises:
        MinillmError: the timeout passed; names the missing processes.
    """
    store.add(f"here/{rank}", 1)
    end = time.monotonic() + patience
    while missing := [one for one in range(size) if store.add(f"here/{one}", 0) == 0]:
        if time.monotonic() > end:
            raise MinillmError(
                f"{_ranks(missing)} did not join within {patience:.0f} s",
                fix="look for its message, here or on its machine; start all processes with one launcher",
            )
        time.sleep(every)


class Watch:
    """A thread that sends this process's heartbeats, and ends the process if another one is lost.

    Args:
        store: a separate connection: a waiting call on a shared one would block the thread.
        rank: of this process.
        size: number of processes.
        patience: seconds of polling without a heartbeat.
        every: seconds between two heartbeats.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        patience: float = PATIENCE,
        every: float = EVERY,
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._patience, self._every = patience, every
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, name="minillm-alive", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the heartbeats and their thread."""
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        others = [rank for rank in range(self._size) if rank != self._rank]
        counts, quiet = dict.fromkeys(others, -1), dict.fromkeys(others, 0.0)
        before = time.monotonic()
        while not self._end.wait(self._every):
            try:
                self._store.add(f"alive/{self._rank}", 1)
                for rank in others:
                    count = self._store.add(f"alive/{rank}", 0)
                    if count != counts[rank]:
                        counts[rank], quiet[rank] = count, 0.0
            except Exception:  # the launcher has closed the store: it ends the processes itself
                return
            # a slow poll proves nothing about the others: the whole machine or the store may have been suspended
            now = time.monotonic()
            looked, before = min(now - before, 2 * self._every), now
            quiet = {rank: seconds + looked for rank, seconds in quiet.items()}
            if lost := [rank for rank, seconds in quiet.items() if seconds > self._patience]:
                self._give_up(lost, quiet[lost[0]])

    def _give_up(self, lost: list[int], seconds: float) -> None:
        verb = "has" if len(lost) == 1 else "have"
        say = f"rank {self._rank}: {_ranks(lost)} {verb} not answered for {seconds:.0f} s: stopped, or lost\n"
        fix = "  fix:   --resume continues from the last checkpoint\n"
        sys.stderr.write(say + fix)
        sys.stderr.flush()
        os._exit(1)  # the main thread may wait in a collective, where no exception reaches it


def _ranks(numbers: Sequence[int]) -> str:
    """Format a list of ranks."""
    return " and ".join(f"rank {number}" for number in numbers)
