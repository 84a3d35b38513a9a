"""Installed versions, and the pip line that installs the rest and leaves torch and mlx alone.

Versions are read from the distributions' metadata: no package is imported.

pip keeps an installed package only as long as nothing asks for more: a plugin that wants a newer
torch gets one, and a build for CUDA gives way to one for CPUs, without a question. With the exact
version on the same line pip keeps it, or installs nothing and says who wants another. It is
``===``, since ``==2.13.0`` is met by ``2.13.0+cu130`` as well, which ``--upgrade`` would take.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

FRAMEWORKS = ("torch", "mlx")


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution; None where it is not installed.

    It is not kept: importlib remembers folders by their date, and what is installed may change.
    """
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def unmet(requirements: Iterable[str]) -> dict[str, str]:
    """Return the requirements that are not met, each with the reason.

    Args:
        requirements: as pip takes them: ``"tensorboard>=2.16"``.
    """
    reasons = {text: _reason(text) for text in requirements}
    return {text: reason for text, reason in reasons.items() if reason}


def _reason(text: str) -> str | None:
    from packaging.version import InvalidVersion, Version

    # A floor is nearly every requirement; to import packaging's parser takes some 20 ms of a start.
    if floor := re.fullmatch(r"([\w-]+)>=([\d.]*\d)", text):
        with suppress(InvalidVersion):
            if (found := installed_version(floor[1])) is None:
                return "it is not installed"
            return None if Version(found) >= Version(floor[2]) else f"here is {found}"
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        need = Requirement(text)
    except InvalidRequirement as error:
        return f"this is no requirement ({str(error).splitlines()[0]})"
    if (found := installed_version(need.name)) is None:
        return "it is not installed"
    try:
        met = need.specifier.contains(found, prereleases=True)
    except InvalidVersion:
        met = False
    return None if met else f"here is {found}"


def frameworks() -> dict[str, str]:
    """Map each installed framework to its version."""
    found = {name: installed_version(name) for name in FRAMEWORKS}
    return {name: here for name, here in found.items() if here is not None}


def pip_line(
    *requirements: str, upgrade: bool = False, keep: Mapping[str, str] | None = None
) -> str:
    """Write the line to type into a shell.

    Args:
        requirements: as pip takes them: ``minillm-muon``, ``minillm-core[torch]``.
        upgrade: what is installed of them is to be replaced by the newest.
        keep: framework -> version that must stay; default: those that are installed.
    """
    pins = (f"{name}==={v}" for name, v in (frameworks() if keep is None else keep).items())
    words = ["pip", "install", *(["--upgrade"] if upgrade else []), *requirements, *pins]
    return shlex.join(words)
