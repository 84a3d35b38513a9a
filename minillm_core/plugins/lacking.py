"""Our own plugins that a run names and that are not installed: one line installs them all."""

from __future__ import annotations

import sys
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version

from minillm_core.errors import PluginError
from minillm_core.install import pip_line
from minillm_core.plugins.first_party import FIRST_PARTY

__all__ = ["installing", "lacking"]


def lacking(missing: Collection[str]) -> PluginError:
    """Why a run cannot start without them.

    Args:
        missing: names of :data:`FIRST_PARTY` that no installed distribution offers.
    """
    return PluginError(
        f"{len(missing)} plugins of this run are not installed: {', '.join(sorted(missing))}",
        where=f"looked among the plugins installed for {sys.executable}",
        fix=installing(missing),
    )


def installing(names: Collection[str]) -> str:
    """The pip line for plugins of ours; a distribution that is here without them is too old."""
    needed = sorted({FIRST_PARTY[name] for name in names})
    old = any(_present(requirement.partition("[")[0]) for requirement in needed)
    return pip_line(*needed, upgrade=old)


def _present(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True
