"""Whether what a plugin requires is installed: asked of metadata, nothing is imported."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion

__all__ = ["unmet"]


def unmet(requirements: Iterable[str]) -> dict[str, str]:
    """Requirement -> why it is not met; those that are met are left out.

    Args:
        requirements: as pip takes them: ``"tensorboard>=2.16"``.
    """
    reasons = {text: _reason(text) for text in requirements}
    return {text: reason for text, reason in reasons.items() if reason}


def _reason(text: str) -> str | None:
    try:
        need = Requirement(text)
        here = version(need.name)
    except InvalidRequirement as error:
        return f"this is no requirement ({str(error).splitlines()[0]})"
    except PackageNotFoundError:
        return "it is not installed"
    try:
        met = need.specifier.contains(here, prereleases=True)
    except InvalidVersion:
        met = False
    return None if met else f"here is {here}"
