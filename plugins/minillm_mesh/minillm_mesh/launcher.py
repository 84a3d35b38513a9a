"""The launcher of a run's processes on this machine: starts and ends them together, with one exit code.

torch's multiprocessing starts them, each in its own session: Ctrl-C reaches only this process, which
forwards it. Their output goes to the terminal unchanged; each process prints its rank.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext

GRACE = 30
"""Grace period in seconds after another process failed, or after the second signal."""

SAVING = 24 * 3600
"""Grace period in seconds after the first signal, which requests a checkpoint: as long as that takes."""

CAUSE = 5
"""Seconds for the other processes to end by themselves after one reports a lost process."""

LOOK = 0.1
"""Seconds between two polls of the processes."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that torch's multiprocessing turns into an exception in this process."""


def launch(processes: int, command: Sequence[str]) -> int:
    """Run a Python command in several processes on this machine until all have ended.

    Args:
        processes: number of processes.
        command: arguments of ``python``: ``-m minillm_core train ...``.

    Returns:
        The exit code of the run. 0 if all returned 0. If one failed, its code, or 128 plus the
        number of the signal that ended it; the others are then ended. After a signal to this process,
        which is forwarded to all, the code of rank 0: 75 if it saved a checkpoint, else 130.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 is to connect, not to serve
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    ranks = range(processes)
    with _as_before(), TemporaryDirectory(prefix="minillm-ranks-") as logs:
        try:
            context = start_processes(
                "minillm",
                sys.executable,
                dict.fromkeys(ranks, tuple(command)),
                {rank: {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in ranks},
                DefaultLogsSpecs(log_dir=logs),
            )
        except SignalException:
            return 130
        assert isinstance(context, SubprocessContext)
        try:
            return _failed(context) or 0
        except SignalException as first:
            return _stopped(context, first)
        finally:
            context.close(signal.SIGKILL)  # a third signal leaves nothing behind


@contextmanager
def _as_before() -> Iterator[None]:
    """Silence torch's own messages, less informative than the processes'; restore the signal handlers."""
    log = logging.getLogger("torch.distributed.elastic")
    level, handlers = log.level, {number: signal.getsignal(number) for number in SIGNALS}
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _failed(context: SubprocessContext) -> int:
    """Wait until all have ended; if one fails, end the others and return its code."""
    while not any(codes := _codes(context)) and None in codes:
        time.sleep(LOOK)
    if not any(codes):
        return 0
    # 1 is also the code of a process that lost another one, and it may end before that one does
    until = time.monotonic() + CAUSE
    while {*codes} <= {0, 1, None} and None in codes and time.monotonic() < until:
        time.sleep(LOOK)
        codes = _codes(context)
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            sys.stderr.write(f"rank {rank}: ended by {name}, sent from outside the run\n")
            if name == "SIGKILL":
                sys.stderr.write(
                    "  fix:   check whether memory ran out (dmesg); --resume continues\n"
                )
    context.close(signal.SIGTERM, GRACE)
    failed = [code for code in codes if code]
    return _as_shells(next((code for code in failed if code != 1), 1))


def _stopped(context: SubprocessContext, first: SignalException) -> int:
    """Forward a signal, and a second one; return the code of rank 0."""
    try:
        context.close(first.sigval, SAVING)
    except SignalException as second:
        context.close(second.sigval, GRACE)
    codes = [130 if code is None or code < 0 else code for code in _codes(context)]
    return codes[0] or next(filter(None, codes), 0)


def _codes(context: SubprocessContext) -> list[int | None]:
    """Return the exit code of each rank, None while it runs."""
    return [one.proc.poll() for _, one in sorted(context.subprocess_handlers.items())]


def _as_shells(code: int) -> int:
    """Return an exit code in the shell's convention: 128 plus a signal's number."""
    return code if code > 0 else 128 - code


__all__ = ["launch"]
