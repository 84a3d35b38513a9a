"""``minillm plugins list``: read from metadata and source, nothing is imported."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

from minillm_core.cli.console import emit
from minillm_core.cli.options import AsJson, examples, switch
from minillm_core.install import pip_line, unmet
from minillm_core.plugins.discover import PluginEntry, installed_plugins, unreadable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

EXAMPLES = examples(
    "minillm plugins list", "minillm plugins list -v", "minillm plugins list --json"
)


# Switches alone: any other kind of parameter makes typer import pydantic.
def list_command(
    as_json: AsJson = False,
    verbose: Annotated[
        bool, switch("-v --verbose", "Show whole summaries, versions and states.")
    ] = False,
) -> None:
    """List the installed plugins without importing any; a broken one says why."""
    entries = list_plugins()
    if as_json:
        emit([entry.data() for entry in entries])
        return
    from rich.console import Console

    render_list(entries, Console(), verbose=verbose)


def list_plugins() -> list[PluginEntry]:
    """Return every installed plugin by name, then unreadable distributions, each with the reason."""
    return [*installed_plugins(), *unreadable()]


def render_list(entries: Iterable[PluginEntry], console: Console, *, verbose: bool = False) -> None:
    """Print a line for each plugin.

    In a pipe or a file, or on a wide terminal, lines are complete; otherwise plugins are grouped by
    distribution and summaries are cut.

    Args:
        entries: the plugins.
        console: where to print.
        verbose: print everything at any width, on several lines if needed.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not (rows := list(entries)):
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
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console = Console(file=console.file, width=10_000)
    anywhere = console.options.update(max_width=10_000)
    if verbose or console.measure(table, options=anywhere).maximum <= console.width:
        console.print(table)
        return
    wide = max(len(entry.name) for entry in rows)
    for offered_by in dict.fromkeys(sorted(entry.offered_by for entry in rows)):
        console.print(_cut(Text(offered_by, "bold"), console))
        for entry in (entry for entry in rows if entry.offered_by == offered_by):
            line = Text(f"  {entry.name:<{wide}}  ")
            words, style = _state(entry)
            if entry.broken:
                console.print(line.append(words, style))  # never cut: needed for the fix
                continue
            if style != "green":
                line.append(f"{words.partition(': ')[0]}. ", style)
            console.print(_cut(line.append(entry.summary), console))
    hint = "-v shows everything; minillm plugins info NAME: one plugin"
    console.print(_cut(Text(hint, "dim"), console))


def _cut(line: Text, console: Console) -> Text:
    if console.options.ascii_only and line.cell_len > console.width:
        line.truncate(console.width - 3)
        return line.append("...")
    line.truncate(console.width, overflow="ellipsis")
    return line


def _state(entry: PluginEntry) -> tuple[str, str]:
    """Return the state of a plugin in words, and their style."""
    if entry.broken:
        where = f" ({entry.file})" if not entry.value else ""  # a whole distribution is unreadable
        return f"broken: {entry.broken}{where}", "red"
    if entry.manifest and (lacking := unmet(entry.manifest.requires)):
        return f"needs {', '.join(lacking)}: {pip_line(*lacking)}", "yellow"
    return "ok", "green"
