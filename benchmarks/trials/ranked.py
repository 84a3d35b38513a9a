"""Trainers of several ranks, forked as in :mod:`benchmarks.trials.forked`, and ended as by torchrun.

Starting four Pythons with torch takes ten seconds, four forks a tenth of one. This module does a launcher's work:
environment variables, a rendezvous store in a separate process, and SIGTERM for all once one has failed.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.trials.forked import Child
from benchmarks.trials.tiny_run import TinyRun, minillm

__all__ = ["Group", "RankedRun"]

GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL, as in torchrun."""

LOOK = 0.1
"""Seconds between two polls of the processes, as in ``minillm train --gpus``."""


class Group:
    """The processes of one start of a run, by rank; and their store."""

    def __init__(self, ranks: list[Child], store: Child | None) -> None:
        self.ranks, self._store = ranks, store
        self.began = time.perf_counter()

    def poll(self) -> list[int | None]:
        """Return the exit code of each rank, None while it runs."""
        return [one.poll() for one in self.ranks]

    def wait_until(self, moment: float) -> None:
        """Wait until one has ended, at most until ``moment`` seconds after the start."""
        while not any(one is not None for one in self.poll()):
            if time.perf_counter() > self.began + moment:
                return
            time.sleep(0.0005)

    def end(self, seconds: float = 300.0) -> list[int]:
        """Wait for all as torchrun does: if one fails, the others get SIGTERM, and SIGKILL after a while.

        Returns:
            The exit code of each rank.

        Raises:
            TimeoutError: none failed, and they do not end; they are killed.
        """
        late, term = time.perf_counter() + seconds, 0.0
        try:
            while None in (codes := self.poll()):
                now = time.perf_counter()
                if not term and any(codes):
                    term = now
                    self._signal(signal.SIGTERM)
                elif term and now > term + GRACE:
                    self._signal(signal.SIGKILL)
                elif now > late:
                    raise TimeoutError(f"ranks still ran after {seconds:.0f} s: {codes}")
                time.sleep(LOOK)
        finally:
            self._signal(signal.SIGKILL)
            if self._store is not None:
                self._store.kill()
        return [one.wait() for one in self.ranks]

    def _signal(self, number: signal.Signals) -> None:
        for one in self.ranks:
            if one.poll() is None:
                os.kill(one.pid, number)


@dataclass(frozen=True)
class RankedRun(TinyRun):
    """A run of several ranks over gloo, or of one process, to be started; it has its own token cache.

    Attributes:
        shard: ``mesh.shard`` of several ranks.
    """

    shard: str = "auto"

    def launch(
        self, out: Path, size: int, *, resume: bool = False, first: Callable[[int], None] = print
    ) -> Group:
        """Fork the ranks.

        Args:
            out: the run's folder.
            size: number of ranks; 1: a process without a launcher.
            resume: from the newest checkpoint, as with ``--resume``.
            first: called in each process with its rank before anything else.
        """
        port = _free_port()
        store = self.fork(lambda: _serve(port), self.folder / "store.log") if size > 1 else None
        shard = self.shard if size > 1 else "auto"
        arguments = [*self.arguments(out, resume=resume), f"mesh.shard={shard}"]

        def run(rank: int) -> int:
            os.environ["MINILLM_CACHE"] = str(self._cache(out))
            if size > 1:
                given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
                given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                given |= {"TORCHELASTIC_USE_AGENT_STORE": True}  # the store is not on rank 0
                os.environ.update({name: str(value) for name, value in given.items()})
            first(rank)
            return minillm(arguments)

        ranks = [self.fork(lambda rank=n: run(rank), self.log(out)) for n in range(size)]
        return Group(ranks, store)

    def tidy(self, out: Path, *, keep: bool) -> None:
        """Remove a run, its log and its tokens, or keep the first two."""
        shutil.rmtree(self._cache(out), ignore_errors=True)
        super().tidy(out, keep=keep)

    def _cache(self, out: Path) -> Path:
        return self.folder / f"{out.name}-cache"


def _serve(port: int) -> int:
    """Serve the store of one start until this process is killed."""
    from torch.distributed import TCPStore

    kept = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    while kept is not None:
        time.sleep(3600)
    return 0


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
