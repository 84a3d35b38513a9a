"""The environment of a measurement: hardware, versions, commit. Imports no framework."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
DISTRIBUTIONS = (
    *(
        "minillm-core",
        "minillm-cute",
        "minillm-liger",
        "minillm-mix",
        "minillm-modded",
        "minillm-muon",
        "minillm-optim",
        "minillm-track",
        "minillm-triton",
    ),
    *("flash-attn-4", "quack-kernels", "liger-kernel", "torch", "mlx", "numpy"),
)


def environment(commit: str | None = None) -> dict[str, Any]:
    """Return hardware, versions, commit and date, as JSON: the ``environment`` of every result file.

    Args:
        commit: the measured commit, for a copy of the tree without ``.git``.

    Returns:
        ``date`` (UTC, to the second), ``commit`` (with ``-dirty`` if the tree was changed; None
        if unknown), ``hardware`` (see :func:`hardware`) and ``versions`` (None for a distribution that is
        not installed).
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit or _commit(),
        "hardware": hardware(),
        "versions": {"python": platform.python_version()}
        | {name: _version(name) for name in DISTRIBUTIONS},
    }


def hardware() -> dict[str, Any]:
    """Describe the machine: system, processor, usable cores, memory in bytes, and its GPUs with drivers."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": _usable_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": _gpus(),
    }


def write(name: str, figures: Any, *, commit: str | None = None, folder: Path = RESULTS) -> Path:
    """Write ``figures`` to ``NAME.json`` under ``folder``, with the command and the environment.

    Returns:
        The file's path.
    """
    path = folder / f"{name}.json"
    keep(path, name, figures, command=own_command(), about=environment(commit))
    return path


def keep(
    path: Path, name: str, figures: Any, *, command: Sequence[str], about: Mapping[str, Any]
) -> None:
    """Write a result file of figures that were measured elsewhere, or earlier.

    Args:
        path: the file; its folder is created.
        name: of the benchmark.
        figures: as JSON.
        command: the command that measured them.
        about: the environment returned there by :func:`environment`.
    """
    document = {"benchmark": name, "command": command, "environment": about, "figures": figures}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def own_command() -> list[str]:
    """Return the command line of this process, starting with the script's name; absolute paths by their names."""
    words = sys.argv[1:]
    named = [Path(word).name if Path(word).is_absolute() else word for word in words]
    return [Path(sys.argv[0]).name, *named]


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """Return a command's output; None if it does not exist or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _commit() -> str | None:
    # Only our own repository counts: without the check, git would use an enclosing one.
    if not (ROOT / ".git").exists() or (head := _output("git", "rev-parse", "HEAD")) is None:
        return None
    return head + ("-dirty" if _output("git", "status", "--porcelain") else "")


def _processor() -> str:
    if platform.system() == "Darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _usable_cores() -> int | None:
    affinity = getattr(os, "sched_getaffinity", None)  # absent on macOS
    return len(affinity(0)) if affinity else os.cpu_count()


def _gpus() -> list[dict[str, str]]:
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return [{"name": f"{_processor()} (integrated)", "driver": platform.mac_ver()[0]}]
    listing = _output(
        "nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"
    )
    fields = [line.split(", ") for line in (listing or "").splitlines()]
    return [{"name": name, "driver": driver, "memory": memory} for name, driver, memory in fields]
