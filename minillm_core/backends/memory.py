"""Memory: the limit and peak of this process, and the frameworks' out-of-memory errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from minillm_core.errors import OutOfMemory

SIGNS = (
    "out of memory",  # CUDA's, Metal's
    "can't allocate memory",  # torch on a CPU
    "Storage size calculation overflowed",  # torch, for an array larger than the address space
    "Unable to allocate",  # MLX
    "bad_alloc",
)
"""Substrings of the RuntimeErrors raised when memory runs out: on a CPU the frameworks have no type for it."""


@contextmanager
def memory_or_error() -> Iterator[None]:
    """Convert a framework's out-of-memory error to OutOfMemory.

    Raises:
        OutOfMemory: memory ran out; its text is the first line of the framework's error.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not any(sign in text for sign in SIGNS):
            raise
        raise OutOfMemory(
            text.splitlines()[0][:200], fix="a smaller model, fewer rows, or shorter rows"
        ) from error


def memory() -> int:
    """Return the bytes that this process may use: its control group's limit, or the machine's memory."""
    return memory_limit() or psutil.virtual_memory().total


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the memory limit of this process's control group in bytes; None: no limit is set."""
    for path in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = int((root / path).read_text())
        except (OSError, ValueError):  # absent, or "max"
            continue
        if limit < psutil.virtual_memory().total:
            return limit
    return None


def process_peak(status: Path = Path("/proc/self/status")) -> int | None:
    """Return the peak resident memory of the process since it started, in bytes; None: unknown.

    It includes Python, the framework's libraries, the tokens read, and every model that the process
    has held: on a CPU no framework counts its own allocations. It never falls.
    """
    try:  # on Linux getrusage also counts the program that this process ran before exec
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        pass
    if os.name == "nt":
        return getattr(psutil.Process().memory_info(), "peak_wset", None)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
