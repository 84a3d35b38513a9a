"""Processes with a launcher's variables, forked from one that has imported torch and computed nothing.

The fixture ``processes`` calls it. A start of Python with torch takes seconds of a core, a fork milliseconds.
Tests whose subject is a launcher, or the loss of a process, start torchrun instead.

    forked.py SIZE MODULE ...             runs a module in SIZE processes; 1: without a launcher's variables
    forked.py SIZE@STEP:OUT MODULE ...    all get SIGTERM once the run in OUT has made that many steps
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

SECONDS = 600.0
GRACE = 30.0
"""Seconds that a process has for its end after SIGTERM: torchrun's."""

LOOK = 0.05
"""Seconds between two looks at the processes."""


def main(arguments: Sequence[str]) -> None:
    """Fork the processes, and exit with 0, or the code of the process that failed first."""
    asked, *command = arguments
    size, _, stop = asked.partition("@")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listening.getsockname()[1])}
        given |= {"WORLD_SIZE": size, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        pids = [_forked(rank, int(size), given, command) for rank in range(int(size))]
        store = _served(listening) if len(pids) > 1 else None
        codes = _ended(pids, stop)
    del store
    for code in codes:
        if code < 0:
            print(f"a process was ended by {signal.Signals(-code).name}", file=sys.stderr)
    sys.exit(next((code for code in codes if code), 0))


def _forked(rank: int, size: int, given: dict[str, str], command: Sequence[str]) -> int:
    """Fork a rank; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if size > 1:
            os.environ.update(given, RANK=str(rank), LOCAL_RANK=str(rank))
        sys.argv = [*command]
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.stderr.write(f"rank {rank}: {traceback.format_exc()}")
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _served(listening: socket.socket) -> object:
    """Serve the store in which the ranks meet; its threads are not forked, as the ranks are there."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    address, port = listening.getsockname()
    given = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listening.detach()}
    return TCPStore(address, port, **given)


def _ended(pids: Sequence[int], stop: str) -> list[int]:
    """Wait for all as torchrun does: where one fails, the others get SIGTERM, and SIGKILL after a while.

    Returns:
        The exit codes in the order of their ends, minus a signal's number where that ended a process.

    Raises:
        TimeoutError: they did not end; they are killed.
    """
    codes: dict[int, int] = {}
    late, term = time.monotonic() + SECONDS, 0.0
    step, _, out = stop.partition(":")
    try:
        while left := [pid for pid in pids if pid not in codes]:
            time.sleep(LOOK)
            for pid in left:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            now = time.monotonic()
            if now > late:
                raise TimeoutError(f"processes still ran after {SECONDS:.0f} s: {codes}")
            if not term and (any(codes.values()) or (stop and _steps(Path(out)) >= int(step))):
                term = now
                _signal(set(pids) - codes.keys(), signal.SIGTERM)
            elif term and now > term + GRACE:
                _signal(set(pids) - codes.keys(), signal.SIGKILL)
    finally:
        _signal(set(pids) - codes.keys(), signal.SIGKILL)
    return [*codes.values()]


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _steps(out: Path) -> int:
    """Return how many steps a run has made."""
    file = out / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []  # the last may be torn
    events = map(json.loads, lines)
    return max((event["step"] for event in events if event["event"] == "step"), default=0)


if __name__ == "__main__":
    main(sys.argv[1:])
