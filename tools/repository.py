"""Facts of this repository: its root, and the plugins of its distributions."""

from __future__ import annotations

import tomllib
from pathlib import Path

from minillm_core.plugins.discover import GROUP

__all__ = ["ROOT", "ours"]

ROOT = Path(__file__).parents[1]


def ours() -> list[str]:
    """Return the names of the plugins in this repository, sorted."""
    names: list[str] = []
    for path in sorted(ROOT.glob("plugins/*/pyproject.toml")):
        project = tomllib.loads(path.read_text())["project"]
        names += project.get("entry-points", {}).get(GROUP, {})
    return sorted(names)
