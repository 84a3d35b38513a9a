"""Where the settings of a plan come from, as lines of ``key=value`` under each place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from minillm_core.config.values import show
from minillm_core.text import plain

if TYPE_CHECKING:
    from minillm_core.config.load import Loaded

__all__ = ["settings_table"]

UNSAID = "default"
"""What nobody said: docs/settings.md has it."""


def settings_table(loaded: Loaded) -> Table:
    """A row a place, the preset first, in each the plugins that it names and then what it sets.

    Settings at their defaults are left out.
    """
    by_place: dict[str, list[str]] = {}
    names_first = sorted(loaded.origins.items(), key=lambda one: not one[0].startswith("plugins."))
    for key, place in names_first:
        if place != UNSAID:
            by_place.setdefault(place, []).append(_given(loaded, key))
    lowest = f"preset {loaded.config.preset}"
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    table.add_column("settings from", overflow="fold")
    table.add_column("", overflow="fold")
    for place in sorted(by_place, key=lambda place: (place != lowest, place)):
        table.add_row(Text(plain(place)), Text("  ".join(map(plain, by_place[place]))))
    return table


def _given(loaded: Loaded, key: str) -> str:
    """``train.lr=0.002``; the key alone where it has no value: a plugin's name, what was cleared."""
    owner, _, name = key.partition(".")
    plugins = loaded.config.plugins
    if owner == "plugins":
        return name
    value: Any = loaded.config
    if owner in plugins:
        value = plugins[owner][name]
    else:
        for part in key.split("."):
            value = getattr(value, part)
    return key if value is None else f"{key}={show(value)}"
