"""What this machine has: installed versions and GPUs; and the pip line for missing packages, which keeps torch and mlx.

Versions are read from the distributions' metadata, GPUs from the driver: no package is imported.

pip replaces an installed package without asking if a requirement is newer: a plugin that requires a newer
torch gets it, and a CUDA build may give way to a CPU build. With the exact version on the same line, pip
keeps it, or installs nothing and reports the conflicting requirement. The operator is ``===``, since
``==2.13.0`` also matches ``2.13.0+cu130``, which ``--upgrade`` would install.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from importlib.metadata import Distribution, PackageNotFoundError
from importlib.metadata import distribution as installed

FRAMEWORKS = ("torch", "mlx")
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_...


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution; None if it is not installed.

    Installations may change: importlib caches folders by their modification time, and an unchanged file
    of metadata is parsed once.
    """
    try:
        found = installed(distribution)
    except PackageNotFoundError:
        return None
    folder = str(getattr(found, "_path", ""))
    try:
        return _version(folder, os.stat(f"{folder}/METADATA").st_mtime_ns)
    except OSError:  # in an archive, or of an old format
        return found.version


@lru_cache(1024)
def _version(folder: str, changed: int) -> str:
    return Distribution.at(folder).version


def unmet(requirements: Iterable[str]) -> dict[str, str]:
    """Return the requirements that are not met, each with the reason.

    Args:
        requirements: pip requirements: ``"tensorboard>=2.16"``.
    """
    reasons = {text: _reason(text) for text in requirements}
    return {text: reason for text, reason in reasons.items() if reason}


def _reason(text: str) -> str | None:
    from packaging.version import InvalidVersion, Version

    # Nearly every requirement is a lower bound; importing packaging's parser takes some 20 ms.
    if floor := re.fullmatch(r"([\w-]+)>=([\d.]*\d)", text):
        with suppress(InvalidVersion):
            if (found := installed_version(floor[1])) is None:
                return "it is not installed"
            return None if Version(found) >= Version(floor[2]) else f"here is {found}"
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        need = Requirement(text)
    except InvalidRequirement as error:
        return f"this is not a requirement ({str(error).splitlines()[0]})"
    if (found := installed_version(need.name)) is None:
        return "it is not installed"
    try:
        met = need.specifier.contains(found, prereleases=True)
    except InvalidVersion:
        met = False
    return None if met else f"here is {found}"


def frameworks() -> dict[str, str]:
    """Return installed framework -> its version."""
    found = {name: installed_version(name) for name in FRAMEWORKS}
    return {name: here for name, here in found.items() if here is not None}


def pip_line(
    *requirements: str, upgrade: bool = False, keep: Mapping[str, str] | None = None
) -> str:
    """Return the pip command to type into a shell.

    Args:
        requirements: pip requirements: ``minillm-muon``, ``minillm-core[torch]``.
        upgrade: replace installed ones by the newest versions.
        keep: framework -> version to keep; default: the installed frameworks.
    """
    pins = (f"{name}==={v}" for name, v in (frameworks() if keep is None else keep).items())
    return shlex.join(["pip", "install", *["--upgrade"] * upgrade, *requirements, *pins])


def gpu_capabilities() -> tuple[tuple[int, int], ...]:
    """Return the compute capability of each NVIDIA GPU of this process, (9, 0) for Hopper; (0, 0): not known.

    CUDA's driver library answers, which honours CUDA_VISIBLE_DEVICES and containers. No framework is imported.
    """
    import ctypes

    def ask(function: Callable[..., int], *arguments: int) -> int:
        # the number that the driver's function writes; 0: it failed
        function(ctypes.byref(value := ctypes.c_int(0)), *arguments)
        return value.value

    for name in ("libcuda.so.1", "nvcuda.dll"):
        with suppress(OSError):
            driver = ctypes.CDLL(name)
            if driver.cuInit(0) == 0:
                gpus = [ask(driver.cuDeviceGet, n) for n in range(ask(driver.cuDeviceGetCount))]
                of = partial(ask, driver.cuDeviceGetAttribute)
                return tuple((of(_MAJOR, gpu), of(_MINOR, gpu)) for gpu in gpus)
    return ()


def gpu_refusal(capability: str) -> str | None:
    """Return why none of this machine's GPUs has a compute capability; None: one has it, or none is known.

    A plan may be for another machine, where the driver shows no GPU here.

    Args:
        capability: ``"==9.0"`` (Hopper alone), or ``">=8.9"`` (Ada, Hopper and later).
    """
    asked, exact = tuple(map(int, capability[2:].split("."))), capability.startswith("==")
    found = sorted({*gpu_capabilities()} - {(0, 0)})
    if not found or asked in found or (not exact and found[-1] > asked):
        return None
    wanted, here = capability[2:] + " or later" * (not exact), (f"{a}.{b}" for a, b in found)
    return f"needs a GPU of compute capability {wanted}, and this machine has {', '.join(here)}"
