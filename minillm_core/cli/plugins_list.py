"""What ``minillm plugins list`` shows: read from metadata and source, nothing is imported."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from minillm_core.install import pip_line
from minillm_core.plugins.discover import PluginEntry, installed_plugins

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["list_json", "list_plugins", "render_list"]


def list_plugins() -> list[PluginEntry]:
    """Every installed plugin, sorted by name, the broken ones with their reason."""
    return installed_plugins()


def list_json(entries: Iterable[PluginEntry]) -> list[dict[str, Any]]:
    """The list as ``--json`` writes it."""
    return [entry.data() for entry in entries]


def render_list(entries: Iterable[PluginEntry], console: Console) -> None:
    """Print the table; where it goes into a pipe or a file, a plugin is one line."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = list(entries)
    if not rows:
        line = f"No plugin is installed. Try: {pip_line('minillm-muon')}"
        console.print(Text(line), soft_wrap=True)
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("name", "distribution", "summary", "state"):
        table.add_column(heading, overflow="fold")
    for entry in rows:
        table.add_row(
            Text(entry.name), Text(entry.offered_by), Text(entry.summary), Text(*_state(entry))
        )
    if not console.is_terminal:
        console = Console(file=console.file, width=10_000)
    console.print(table)


def _state(entry: PluginEntry) -> tuple[str, str]:
    """In words, and in which style."""
    from minillm_core.plugins.needs import unmet

    if entry.broken:
        return f"broken: {entry.broken}", "red"
    if entry.manifest and (lacking := unmet(entry.manifest.requires)):
        return f"needs {', '.join(lacking)}: {pip_line(*lacking)}", "yellow"
    return "ok", "green"
