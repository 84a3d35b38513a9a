"""A plugin's package that lies in the current folder, and was not installed yet."""

from __future__ import annotations

import tomllib
from pathlib import Path

from minillm_core.plugins.discover import GROUP

__all__ = ["begun"]


def begun(name: str, folder: Path) -> Path | None:
    """The package in ``folder``, or beside others in it, whose pyproject.toml names the plugin."""
    for project in (folder / "pyproject.toml", *sorted(folder.glob("*/pyproject.toml"))):
        try:
            entry_points = tomllib.loads(project.read_text())["project"]["entry-points"]
            if name in entry_points[GROUP]:
                return project.parent
        except (OSError, ValueError, KeyError, TypeError):
            continue  # another's, and none of our business
    return None
