"""Two ways to limit disk space: a small file system in memory, or a limit on file size."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.trials.forked import Child

__all__ = ["FileLimit", "Room", "Tmpfs", "enter_namespace"]

SIZE = 64 << 20  # bytes of the file system
PAGE = 4096


class Room(Protocol):
    """The space that a trainer may use under OUT/checkpoints."""

    def open(self) -> None:
        """Set up before the run: without a limit."""
        ...

    @staticmethod
    def points(sizes: Sequence[int]) -> list[int]:
        """List ten amounts of space, each too small for a save of files of these sizes."""
        ...

    def leave(self, room: int, child: Child) -> None:
        """Leave ``room`` bytes to a run in progress."""
        ...

    def make(self, child: Child) -> None:
        """Free the space that was taken."""
        ...

    def close(self) -> None:
        """Clean up after the run."""
        ...


class Tmpfs:
    """A small file system at OUT/checkpoints, and a file that fills it.

    Args:
        place: OUT/checkpoints, which does not exist yet.
    """

    named = "a full tmpfs"

    def __init__(self, place: Path) -> None:
        self.place, self.filler = place, place / "filler"

    def open(self) -> None:  # noqa: D102
        self.place.mkdir(parents=True)
        _run("mount", "-t", "tmpfs", "-o", f"size={SIZE}", "minillm-trials", str(self.place))

    @staticmethod
    def points(sizes: Sequence[int]) -> list[int]:
        """List amounts: none, a page, several within each long file, and one page too few for either short one."""
        model, optimizer, state = (-(-size // PAGE) for size in sizes)
        both = model + optimizer
        pages = (
            *(0, 1, model // 3, 2 * model // 3, model),
            *(model + optimizer // 3, model + 2 * optimizer // 3, both - 1, both, both + state),
        )
        return [PAGE * n for n in pages]

    def leave(self, room: int, child: Child) -> None:  # noqa: D102
        status = os.statvfs(self.place)
        free = status.f_bavail * status.f_frsize - room // PAGE * PAGE
        with self.filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free)

    def make(self, child: Child) -> None:  # noqa: D102
        self.filler.unlink()

    def close(self) -> None:  # noqa: D102
        _run("umount", str(self.place))


class FileLimit:
    """RLIMIT_FSIZE of the running process, which limits the size of its files.

    Args:
        place: OUT/checkpoints.
    """

    named = "RLIMIT_FSIZE"

    def __init__(self, place: Path) -> None:
        self.place = place

    def open(self) -> None:  # noqa: D102
        pass

    @staticmethod
    def points(sizes: Sequence[int]) -> list[int]:
        """List ten positions in the longest file; metrics.jsonl must still grow."""
        shortest, longest = 1 << 16, max(sizes)
        return [shortest + n * (longest - 1 - shortest) // 9 for n in range(10)]

    def leave(self, room: int, child: Child) -> None:  # noqa: D102
        resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (room, -1))

    def make(self, child: Child) -> None:  # noqa: D102
        if child.poll() is None:
            resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (-1, -1))

    def close(self) -> None:  # noqa: D102
        pass


def enter_namespace(module: str, arguments: Sequence[str]) -> bool:
    """Restart this script in a mount namespace, if possible; return whether it now runs there."""
    if "--inside" in arguments:
        return True
    for flags in ("-m", "-rm"):
        mount = "mount -t tmpfs -o size=1m minillm-trials /mnt"
        tried = subprocess.run(
            ["unshare", flags, "sh", "-c", mount], capture_output=True, check=False
        )
        if tried.returncode == 0:
            command = [sys.executable, "-m", module, *arguments, "--inside"]
            os.execvp("unshare", ["unshare", flags, *command])
    return False


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
