"""Multiprocessing with ordered results."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

from minillm_core import MinillmError

Work = TypeVar("Work")
Done = TypeVar("Done")

_AHEAD = 2
"""Work items queued per process."""


def cores() -> int:
    """Count the cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_order(
    function: Callable[[Work], Done], work: Iterable[Work], processes: int
) -> Generator[Done]:
    """Apply a function to each work item in worker processes; yield results in order.

    Close the iterator when leaving early (``contextlib.closing``), which ends the processes. They
    also end when this process is killed.

    Args:
        function: importable from a module, or a partial of such a function.
        work: the items, read a few ahead of the results.
        processes: number of processes; 1: run in this process.

    Raises:
        MinillmError: a process ended, for example out of memory.
    """
    if processes == 1:
        yield from map(function, work)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, _end_with_parent)
    waiting: deque[Future[Done]] = deque()
    try:
        for piece in work:
            with _deaf():
                waiting.append(pool.submit(function, piece))
            if len(waiting) > _AHEAD * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise MinillmError(
            "a process that shared the work ended before it was done",
            where=f"{processes} processes",
            fix="give it more memory; in a script of your own, call this under "
            "if __name__ == '__main__'",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _deaf() -> Iterator[None]:
    """Block SIGINT inside, so that processes started there ignore Ctrl-C and only this one handles it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    """End this process when its parent has ended for any reason."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
