"""Checks of this machine: what it can run, what is missing, and the command that installs it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from minillm_core import BackendError
from minillm_core.inspection import Machine, choose, default_preset, probe
from minillm_lab.doctor.finding import STATES, Finding, can_run
from minillm_lab.doctor.frameworks import (
    LIMIT,
    Examined,
    examine,
    framework_findings,
    nvidia_finding,
)
from minillm_lab.doctor.machine import disk_finding, find_nvidia, system_findings
from minillm_lab.doctor.packages import package_findings

__all__ = ["STATES", "Finding", "can_run", "diagnose"]


def diagnose(cache: Path, limit: float = LIMIT) -> tuple[list[Finding], dict[str, Any]]:
    """Inspect this machine and the installed packages.

    Args:
        cache: the token cache.
        limit: timeout for a framework, in seconds.

    Returns:
        The findings; and the facts reported by the frameworks, as JSON.
    """
    machine, nvidia = probe(), find_nvidia()
    examined = examine_all(machine, limit)
    answers = {n: {"failed": e.failed} if e.failed else dict(e.facts) for n, e in examined.items()}
    findings = [
        *system_findings(),
        disk_finding(cache),
        nvidia_finding(nvidia),
        *framework_findings(machine, examined, nvidia),
        *package_findings(nvidia=bool(nvidia.cards)),
        *_choice(machine, examined),
    ]
    return findings, {"nvidia": asdict(nvidia), **answers}


def examine_all(machine: Machine, limit: float) -> dict[str, Examined]:
    """Examine the installed frameworks concurrently."""
    installed = [name for name in ("torch", "mlx") if getattr(machine, name)]
    with ThreadPoolExecutor() as pool:
        return dict(zip(installed, pool.map(partial(examine, limit=limit), installed), strict=True))


def _choice(machine: Machine, examined: dict[str, Examined]) -> Iterator[Finding]:
    """Determine the default backend and preset of ``minillm train``."""
    try:
        detected = choose(machine)
    except BackendError:  # reported above, with the command that fixes it
        return
    preset, _ = default_preset(machine)
    if failed := examined[detected.backend].failed:
        others = [name for name, one in examined.items() if not one.failed]
        line = f"minillm train --backend {others[0]}" if others else None
        what = f"minillm train would take {detected.backend}, and {failed}"
        yield Finding("train", "broken", what, line)
    else:
        what = f"{detected.backend} on {detected.device}, preset {preset}: {detected.reason}"
        yield Finding("train", "ok", what)
