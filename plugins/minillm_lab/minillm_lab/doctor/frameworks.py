"""torch and MLX: whether they work, the devices they find, and whether they fit this machine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minillm_core.commands import pip_line
from minillm_core.inspection import InstalledFramework, Machine
from minillm_lab.doctor.finding import Finding
from minillm_lab.doctor.machine import Nvidia

LIMIT = 120.0
"""Timeout in seconds. The first import of a framework after booting reads gigabytes."""

DRIVERS = {"13": 580, "12": 525}
"""CUDA's major version -> the oldest driver for it."""

_BUILDS = {"13": "cu130", "12": "cu126"}
_INDEX = "https://download.pytorch.org/whl"

SLOW = 20.0
"""GFLOP/s: the reference BLAS reaches 4 to 5, OpenBLAS 100 and more."""

GAIN = 2.0
"""Speed of bfloat16 products over float32's from which it is recommended on a CPU: a step is not all products."""


@dataclass(frozen=True)
class Examined:
    """The facts that a framework reported about itself."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    failed: str | None = None  # the reason for missing facts


def examine(framework: str, limit: float = LIMIT, command: Sequence[str] | None = None) -> Examined:
    """Import and test a framework in a subprocess, isolated from this process.

    Args:
        framework: ``torch`` or ``mlx``.
        limit: timeout in seconds.
        command: to run instead of ``examine_<framework>.py``.
    """
    script = str(Path(__file__).with_name(f"examine_{framework}.py"))
    # -P: keep the script's folder, whose modules shadow Python's, off sys.path
    command = command or [sys.executable, "-P", script]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return Examined(failed=f"it did not answer within {limit:g} s")
    except OSError as error:
        return Examined(failed=str(error))
    if done.returncode < 0:
        return Examined(failed=f"it crashed: {_signal(-done.returncode)}")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        return Examined(failed=lines[-1])
    try:
        facts = json.loads(done.stdout[done.stdout.index("{") :])  # a framework may print first
    except ValueError:
        return Examined(failed="what it said cannot be read")
    return Examined(facts)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def nvidia_finding(nvidia: Nvidia) -> Finding:
    """Report the GPUs and their driver."""
    if not nvidia.cards:
        return Finding("nvidia", "ok", "no NVIDIA GPU is here")
    cards = ", ".join(nvidia.cards)
    if nvidia.driver is None:
        what = f"{cards}, and no driver for it is loaded"
        return Finding(
            "nvidia", "warning", what, "install the driver: https://www.nvidia.com/drivers"
        )
    return Finding("nvidia", "ok", f"{cards}, driver {nvidia.driver}")


def framework_findings(
    machine: Machine, examined: Mapping[str, Examined], nvidia: Nvidia
) -> Iterator[Finding]:
    """Yield a finding for each framework, and one for each of its faults.

    Args:
        machine: the probe's results, obtained without imports.
        examined: framework -> its facts; installed frameworks only.
        nvidia: the GPUs.
    """
    installed = {"torch": machine.torch, "mlx": machine.mlx}
    works = {
        name
        for name, framework in installed.items()
        if framework and not framework.broken and not examined[name].failed
    }
    for name, framework in installed.items():
        keep = {n: one.version for n, one in installed.items() if one and n != name}
        state = "missing" if works else "broken"
        if framework is None:
            line = pip_line(f"minillm-core[{name}]", keep=keep)
            yield Finding(name, state, "not installed", line)
        elif name not in works:
            yield _unusable(name, framework, examined.get(name, Examined()), keep, state)
        elif name == "torch":
            yield from _torch(framework, examined[name].facts, nvidia, keep)
        else:
            yield from _mlx(machine, framework, examined[name].facts)


def _unusable(
    name: str,
    framework: InstalledFramework,
    examined: Examined,
    keep: Mapping[str, str],
    state: str,
) -> Finding:
    what = (
        f"{framework.version} is installed and does not work: {framework.broken or examined.failed}"
    )
    if framework.broken:  # a part of it was never installed
        pinned = {**keep, name: framework.version}
        return Finding(name, state, what, pip_line(f"minillm-core[{name}]", keep=pinned))
    again = f"{name}=={framework.version}"
    line = pip_line(again, keep=keep).replace("install", "install --force-reinstall --no-deps", 1)
    return Finding(name, "warning" if state == "missing" else state, what, line)


def _torch(
    framework: InstalledFramework, facts: Mapping[str, Any], nvidia: Nvidia, keep: Mapping[str, str]
) -> Iterator[Finding]:
    cuda, devices = facts["cuda"], facts["devices"]
    build = f"CUDA {cuda}" if cuda else "CPU"
    seen = [f"{d['name']} (sm_{d['capability'].replace('.', '')})" for d in devices]
    seen += ["mps"] if facts["mps"] else []
    what = f"{facts['version']}, built for {build}; {', '.join(seen) or 'no GPU'}"
    if not nvidia.cards or devices:
        yield Finding("torch", "ok", what)
    elif cuda is None:
        yield Finding(
            "torch",
            "warning",
            f"{what}: the NVIDIA GPU is of no use to it",
            _for_cuda(framework, nvidia, keep),
        )
    elif nvidia.driver and nvidia.major < DRIVERS.get(cuda.partition(".")[0], 0):
        oldest = DRIVERS[cuda.partition(".")[0]]
        yield Finding(
            "torch",
            "warning",
            f"{what}: its CUDA needs driver {oldest} or newer, here is {nvidia.driver}",
            _for_cuda(framework, nvidia, keep),
        )
    else:
        why = "; ".join(facts["warnings"]) or "it gives no reason"
        yield Finding("torch", "warning", f"{what}, though there is one: {why}")
    for device in devices:
        if "error" in device:
            yield Finding(
                "torch",
                "warning",
                f"{device['name']} is seen and cannot be used: {device['error']}",
                _for_cuda(framework, nvidia, keep),
            )
    gain = facts.get("bfloat16") or 0.0
    if gain >= GAIN:
        yield Finding(
            "torch",
            "optional",
            f"the CPU multiplies {gain:.1f} times as fast in bfloat16 as in float32",
            "minillm train --backend torch --device cpu train.dtype=bfloat16",
        )


def _for_cuda(framework: InstalledFramework, nvidia: Nvidia, keep: Mapping[str, str]) -> str:
    """Return the pip command for the same torch, built for the newest CUDA that the driver supports."""
    fitting = [major for major, oldest in DRIVERS.items() if nvidia.major >= oldest]
    build = _BUILDS[fitting[0] if fitting else min(_BUILDS)]
    torch = f"torch=={framework.version.partition('+')[0]}+{build}"
    return f"{pip_line(torch, keep=keep)} -i {_INDEX}/{build}"


def _mlx(
    machine: Machine, framework: InstalledFramework, facts: Mapping[str, Any]
) -> Iterator[Finding]:
    where = f"{facts['gpu']}: {facts['device']}" if facts["gpu"] else "on the CPU"
    rate = facts.get("gflops")
    speed = f", {rate:.{0 if rate >= 10 else 1}f} GFLOP/s" if rate else ""
    what = f"{facts['version']}, {where}"
    if machine.apple and not facts["gpu"]:
        yield Finding("mlx", "warning", f"{what}: Metal does not answer")
    elif facts["gpu"] or "gflops" not in facts:
        yield Finding("mlx", "ok", what)
    elif facts["blas"] or facts["gflops"] > SLOW:
        yield Finding(
            "mlx", "ok", f"{what}{speed}{', ' if facts['blas'] else ''}{facts['blas'] or ''}"
        )
    else:
        yield Finding(
            "mlx",
            "warning",
            f"{what}{speed}: the BLAS in its wheel is some 25 times as slow as OpenBLAS",
            "sudo apt install libopenblas0-pthread; "
            "LD_PRELOAD=libopenblas.so.0 minillm train --backend mlx",
        )
