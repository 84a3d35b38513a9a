"""A watch on the other processes of a run, beside the collectives.

A collective that waits for a process which never comes says nothing. So each process counts up once a
second in the store where they met, and reads the others' counts: one that stands still is named, and
ends the run.
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
"""Seconds of looking, without a sign of a process, after which it counts as lost.

A launcher gives a stopped process another thirty, and all is to be over within a minute.
"""

EVERY = 1.0
"""Seconds between two signs."""

JOINING = 600.0
"""Seconds in which all processes have to come; each imports a framework first, maybe over a network."""


class Store(Protocol):
    """A map that all processes share."""

    def add(self, key: str, value: int, /) -> int:
        """Add to a number, 0 where there was none, and return it."""
        ...


def meet(
    store: Store, rank: int, size: int, *, patience: float = JOINING, every: float = 0.05
) -> None:
    """Wait until all processes are there, in Python: torch's own wait hears no signal of a launcher.

    Args:
        store: that all share.
        rank: of this process.
        size: how many there are.
        patience: seconds.
        every: seconds between two looks.

    Raises:
        MinillmError: some have not come; it names them.
    """
    store.add(f"here/{rank}", 1)
    end = time.monotonic() + patience
    while missing := [one for one in range(size) if store.add(f"here/{one}", 0) == 0]:
        if time.monotonic() > end:
            raise MinillmError(
                f"{_ranks(missing)} did not come within {patience:.0f} s",
                fix="look for its message, here or on its machine; start all of them with one launcher",
            )
        time.sleep(every)


class Watch:
    """A thread that shows that this process lives, and ends it where another one does not.

    Args:
        store: a connection of its own: one that waits would hold the watch up.
        rank: of this process.
        size: how many there are.
        patience: seconds of looking without a sign.
        every: seconds between two signs.
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
        """Stop looking; the others hear that this process has ended as it should."""
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
            # after a long look nothing is known of the others: the whole machine may have stood still, or the store
            now = time.monotonic()
            looked, before = min(now - before, 2 * self._every), now
            quiet = {rank: seconds + looked for rank, seconds in quiet.items()}
            if lost := [rank for rank, seconds in quiet.items() if seconds > self._patience]:
                self._give_up(lost, quiet[lost[0]])

    def _give_up(self, lost: list[int], seconds: float) -> None:
        verb = "has" if len(lost) == 1 else "have"
        say = f"rank {self._rank}: {_ranks(lost)} {verb} not answered for {seconds:.0f} s: stopped, or lost\n"
        fix = "  fix:   --resume goes on from the last checkpoint\n"
        sys.stderr.write(say + fix)
        sys.stderr.flush()
        os._exit(1)  # the main thread may wait in a collective, where no exception reaches it


def _ranks(numbers: Sequence[int]) -> str:
    """Name ranks."""
    return " and ".join(f"rank {number}" for number in numbers)
