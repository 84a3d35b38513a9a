"""Detection of the framework and device for a run, without importing any framework.

    --backend auto:  CUDA -> torch;  Apple silicon with mlx -> mlx;  else torch, then mlx

``mps`` is used only with ``--device mps``. An installed package may still fail to import: on Linux
``mlx`` installs without its library, so detection also checks for the library.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

from minillm_core.errors import BackendError
from minillm_core.install import gpu_capabilities, installed_version, pip_line

DEVICES: Mapping[str, tuple[str, ...]] = {"torch": ("cpu", "cuda", "mps"), "mlx": ("cpu", "gpu")}
"""Backend -> the kinds of device that it supports."""


@dataclass(frozen=True)
class InstalledFramework:
    """An installed framework."""

    version: str
    cuda: bool = False  # built for NVIDIA GPUs
    broken: str | None = None  # why it cannot be imported


@dataclass(frozen=True)
class Machine:
    """The hardware and frameworks of this machine, as found by :func:`probe`."""

    apple: bool = False  # Apple silicon
    nvidia: int = 0  # GPUs that NVIDIA's driver shows to this process
    torch: InstalledFramework | None = None
    mlx: InstalledFramework | None = None


@dataclass(frozen=True)
class Detected:
    """The chosen backend and device, and the reason."""

    backend: str  # "torch", "mlx"
    device: str  # "cpu", "cuda", "cuda:1", "mps", "gpu"
    reason: str


def probe() -> Machine:
    """Inspect this machine's hardware and installed frameworks."""
    return Machine(
        apple=platform.system() == "Darwin" and platform.machine() == "arm64",
        nvidia=len(gpu_capabilities()),
        torch=_torch(),
        mlx=_mlx(),
    )


def choose(machine: Machine, backend: str = "auto", device: str = "auto") -> Detected:
    """Choose the backend and device for these options.

    Raises:
        BackendError: the backend is not installed or cannot be imported, no backend is installed, or
            the backend does not support the device or finds none here.
    """
    kind, colon, number = device.partition(":")
    if backend != "auto":
        _require(machine, backend)
        reason = f"--backend {backend}"
    else:
        backend, reason = _automatic(machine, kind)
    if device == "auto":
        device, why = _best_device(machine, backend)
        return Detected(backend, device, f"{reason}; {why}")
    if kind not in DEVICES[backend]:
        others = [name for name, kinds in DEVICES.items() if kind in kinds]
        elsewhere = f"; {kind} belongs to --backend {others[0]}" if others else ""
        what, fix = f"{backend} knows no device '{device}'", " or ".join(DEVICES[backend])
        raise BackendError(what, where=f"--device {device}", fix=f"--device {fix}{elsewhere}")
    if colon and (kind != "cuda" or not re.fullmatch("[0-9]{1,3}", number)):
        fix = "--device cuda:1" if kind == "cuda" else f"--device {kind}"
        what = "only cuda devices have a number, counted from 0"
        raise BackendError(what, where=f"--device {device}", fix=fix)
    if kind == "mps" and not machine.apple:
        what, fix = "this machine has no mps: it is the GPU of Apple silicon", "--device cpu"
        raise BackendError(what, where=f"--device {device}", fix=f"{fix}, or leave it out")
    return Detected(backend, device, f"{reason}; --device {device}")


def default_preset(
    machine: Machine, backend: str = "auto", device: str = "auto"
) -> tuple[str, str]:
    """Return the default preset, tiny on a CPU, small on a GPU, and the reason.

    Without an installed backend it is tiny: a plan can still be built.
    """
    try:
        detected = choose(machine, backend, device)
    except BackendError:
        return "tiny", "a machine without a usable backend"
    if detected.device == "cpu":
        return "tiny", f"{detected.backend} on a CPU"
    return "small", f"{detected.backend} on a GPU ({detected.device})"


def _automatic(machine: Machine, kind: str) -> tuple[str, str]:
    if kind not in ("auto", "cpu"):  # the device decides
        for name, kinds in DEVICES.items():
            if kind in kinds:
                _require(machine, name)
                return name, f"{name}, since it is the backend for {kind}"
        known = sorted({kind for kinds in DEVICES.values() for kind in kinds})
        what = f"no backend knows a device '{kind}'"
        fix = f"one of {', '.join(known)}; a number picks one of several: cuda:1"
        raise BackendError(what, where=f"--device {kind}", fix=fix)
    torch, mlx = _usable(machine.torch), _usable(machine.mlx)
    for name, framework, fits, reason in (
        ("torch", torch, machine.nvidia and torch and torch.cuda, "there is an NVIDIA GPU"),
        ("mlx", mlx, machine.apple, "this is Apple silicon"),
        ("torch", torch, True, "it is installed"),
        ("mlx", mlx, True, "torch is not installed"),
    ):
        if framework and fits:
            return name, f"{name} {framework.version}, since {reason}"
    broken = machine.mlx.broken if machine.mlx else None
    what = "no backend is installed" + (f", and mlx cannot be used: {broken}" if broken else "")
    fix = f"{_install(machine, 'torch')}, or {_install(machine, 'mlx')}"
    raise BackendError(what, where="neither torch nor mlx can be imported by this Python", fix=fix)


def _best_device(machine: Machine, backend: str) -> tuple[str, str]:
    if backend == "mlx":
        if machine.apple:
            return "gpu", "its GPU"
        if machine.nvidia and machine.mlx and machine.mlx.cuda:
            return "gpu", "an NVIDIA GPU and mlx built for CUDA"
        return "cpu", "a CPU: mlx finds no GPU that it is built for"
    if machine.nvidia and machine.torch and machine.torch.cuda:
        return "cuda", f"{machine.nvidia} NVIDIA GPU{'s' if machine.nvidia > 1 else ''}"
    if machine.nvidia:
        return "cpu", "a CPU: there is an NVIDIA GPU, but this torch is built without CUDA"
    if machine.apple:
        return "cpu", "a CPU: torch uses a Mac's GPU only with --device mps"
    return "cpu", "a CPU: no NVIDIA driver answers"


def _require(machine: Machine, backend: str) -> None:
    """Check that a named backend exists and can be imported; raises BackendError."""
    if backend not in DEVICES:
        raise BackendError(
            f"there is no backend '{backend}'", fix=f"--backend auto, {', '.join(DEVICES)}"
        )
    framework: InstalledFramework | None = getattr(machine, backend)
    if _usable(framework):
        return
    problem = "is not installed"
    if framework:
        problem = f"{framework.version} is installed and cannot be imported: {framework.broken}"
    where, fix = f"--backend {backend}", _install(machine, backend)
    raise BackendError(f"{backend} {problem}", where=where, fix=fix)


def _usable(framework: InstalledFramework | None) -> InstalledFramework | None:
    return framework if framework and not framework.broken else None


def _install(machine: Machine, backend: str) -> str:
    installed = {"torch": machine.torch, "mlx": machine.mlx}
    keep = {name: found.version for name, found in installed.items() if found}
    return pip_line(f"minillm-core[{backend}]", keep=keep)


def _torch() -> InstalledFramework | None:
    spec = _located("torch")
    if spec is None or spec.origin is None:
        return None
    facts = ""
    with suppress(OSError):
        facts = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    built = re.search(r"^cuda\b.*?=\s*['\"]", facts, re.MULTILINE)
    return InstalledFramework(installed_version("torch") or "?", cuda=built is not None)


def _mlx() -> InstalledFramework | None:
    spec = _located("mlx")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    if not any(found for folder in folders for found in folder.glob("core.*")):
        return None
    library = any(found for folder in folders for found in folder.glob("lib/libmlx.*"))
    return InstalledFramework(
        installed_version("mlx") or "?",
        cuda=any(installed_version(f"mlx-cuda-{major}") for major in (12, 13)),
        broken=None if library else "its library libmlx is missing",
    )


def _located(module: str) -> ModuleSpec | None:
    with suppress(ValueError):  # sys.modules has a module of this name without a spec
        return find_spec(module)  # of a top-level module: imports nothing
    return None
