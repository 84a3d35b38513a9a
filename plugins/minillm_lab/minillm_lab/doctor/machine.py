"""The machine: Python, cores, memory, compilers, disk, and NVIDIA GPUs, found without a framework."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from minillm_core.inspection import memory_limit
from minillm_lab.doctor.finding import Finding

OLDEST_PYTHON = (3, 11)

LITTLE_DISK = 1 << 30
"""Free bytes below which tokens and checkpoints soon fill the disk."""

_VENDOR, _DISPLAY = "0x10de", "0x03"  # of PCI


def system_findings(
    python: tuple[int, ...] = sys.version_info[:3], root: Path = Path("/")
) -> Iterator[Finding]:
    """Report Python, the system, cores, memory and compilers.

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
    """Report the token cache: whether it is writable, and its free space."""
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


@dataclass(frozen=True)
class Nvidia:
    """NVIDIA GPUs and driver."""

    cards: tuple[str, ...] = ()  # names, where the driver reports them
    driver: str | None = None  # its version; None: none is loaded

    @property
    def major(self) -> int:
        """Return the driver's major version; 0: unknown."""
        found = re.match(r"\d+", self.driver or "")
        return int(found[0]) if found else 0


def find_nvidia(root: Path = Path("/")) -> Nvidia:
    """Find GPUs by the kernel's files, then ``nvidia-smi``, then the PCI bus, which works without a driver.

    Args:
        root: of the file system.
    """
    return _from_kernel(root) or _from_tool() or _from_bus(root)


def _from_kernel(root: Path) -> Nvidia | None:
    folder = root / "proc" / "driver" / "nvidia"
    try:
        version = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", (folder / "version").read_text())
    except OSError:
        return None
    cards = []
    for path in sorted(folder.glob("gpus/*/information")):
        found = re.search(r"^Model:\s*(.+?)\s*$", path.read_text(errors="replace"), re.MULTILINE)
        cards.append(found[1] if found else "an NVIDIA GPU")
    return Nvidia(tuple(cards), version[1] if version else "?") if cards else None


def _from_tool() -> Nvidia | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    ask = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [line.rpartition(",") for line in done.stdout.splitlines() if "," in line]
    if not rows:
        return None
    return Nvidia(tuple(name.strip() for name, _, _ in rows), rows[0][2].strip())


def _from_bus(root: Path) -> Nvidia:
    cards = []
    for device in sorted((root / "sys" / "bus" / "pci" / "devices").glob("*")):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == _VENDOR and kind.startswith(_DISPLAY):
            cards.append("an NVIDIA GPU")
    return Nvidia(tuple(cards))
