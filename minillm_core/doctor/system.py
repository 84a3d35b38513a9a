"""Python, the system, cores, memory, compilers and disk."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from minillm_core.doctor.finding import Finding

__all__ = ["OLDEST_PYTHON", "disk_finding", "memory_limit", "system_findings"]

OLDEST_PYTHON = (3, 11)

LITTLE_DISK = 1 << 30
"""Fewer free bytes than these are soon used up by tokens and checkpoints."""


def system_findings(
    python: tuple[int, ...] = sys.version_info[:3], root: Path = Path("/")
) -> Iterator[Finding]:
    """Of what minillm stands on.

    Args:
        python: the interpreter's version.
        root: of the file system.
    """
    number = ".".join(map(str, python))
    if python[:2] < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        yield Finding("python", "broken", f"{number}; minillm needs {oldest} or newer")
    else:
        yield Finding("python", "ok", f"{number}, {sys.executable}")
    yield Finding("system", "ok", f"{platform.platform()}, {platform.machine()}")
    yield Finding("cpu", "ok", _cores())
    yield _memory(memory_limit(root))
    compiler = shutil.which("g++") or shutil.which("clang++") or shutil.which("cl")
    if compiler:
        yield Finding("compiler", "ok", compiler)
    else:
        what = "no C++ compiler: MLX does not compile on a CPU without one, nor does torch"
        yield Finding("compiler", "missing", what, _compiler_command())


def disk_finding(cache: Path) -> Finding:
    """Where tokens are kept: whether it can be written to, and how much it can take."""
    folder = next(place for place in (cache, *cache.absolute().parents) if place.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        what = f"{cache} cannot be written to: no tokens can be kept there"
        return Finding("cache", "broken", what, "export MINILLM_CACHE=... (a folder of yours)")
    free = shutil.disk_usage(folder).free
    what = f"{cache}, {_sized(free)} free"
    if free < LITTLE_DISK:
        command = "export MINILLM_CACHE=... (a folder on a larger disk)"
        return Finding("cache", "warning", f"{what}: that is soon used up", command)
    return Finding("cache", "ok", what)


def memory_limit(root: Path) -> int | None:
    """What the control group of this process may use, in bytes; None: no limit is set."""
    for path in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = int((root / path).read_text())
        except (OSError, ValueError):  # absent, or "max"
            continue
        if limit < psutil.virtual_memory().total:
            return limit
    return None


def _cores() -> str:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    word = "core" if usable == 1 else "cores"
    others = "" if usable == os.cpu_count() else f" of the machine's {os.cpu_count()}"
    return f"{usable} {word}{others}"


def _memory(limit: int | None) -> Finding:
    memory = psutil.virtual_memory()
    capped = f", of which this container may use {_sized(limit)}" if limit else ""
    what = f"{_sized(memory.total)}, {_sized(memory.available)} available{capped}"
    return Finding("memory", "ok", what)


def _compiler_command() -> str:
    commands = {"Darwin": "xcode-select --install", "Windows": "winget install LLVM.LLVM"}
    return commands.get(platform.system(), "sudo apt install g++   (or your system's like)")


def _sized(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB"
