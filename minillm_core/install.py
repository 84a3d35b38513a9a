"""The pip line that installs what is missing, and leaves the installed torch and mlx alone.

pip keeps an installed package only as long as nothing asks for more: a plugin that wants a newer
torch gets one, and a build for CUDA gives way to one for CPUs, without a question. With the exact
version on the same line pip keeps it, or installs nothing and says who wants another. It is
``===``, since ``==2.13.0`` is met by ``2.13.0+cu130`` as well, which ``--upgrade`` would take.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

__all__ = ["FRAMEWORKS", "frameworks", "pip_line"]

FRAMEWORKS = ("torch", "mlx")


def frameworks() -> dict[str, str]:
    """Framework -> the version that is installed; those that are not are left out."""
    found = {}
    for name in FRAMEWORKS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def pip_line(
    *requirements: str, upgrade: bool = False, keep: Mapping[str, str] | None = None
) -> str:
    """What to type into a shell.

    Args:
        requirements: as pip takes them: ``minillm-muon``, ``minillm-core[torch]``.
        upgrade: what is installed of them is to be replaced by the newest.
        keep: framework -> version that must stay; default: those that are installed.
    """
    pins = (f"{name}==={v}" for name, v in (frameworks() if keep is None else keep).items())
    words = ["pip", "install", *(["--upgrade"] if upgrade else []), *requirements, *pins]
    return shlex.join(words)
