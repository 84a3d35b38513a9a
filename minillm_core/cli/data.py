"""``minillm data cache``: the tokens that are kept between runs."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from minillm_core.cli.options import AsJson, Debug, Help, command, help_without_command

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console

    from minillm_core.data.store import Kept

cache = typer.Typer()


@cache.callback(invoke_without_command=True)
def cache_root(context: typer.Context, debug: Debug = False, show_help: Help = False) -> None:
    """Show and clear the token cache.

    Text is tokenised once, then kept in $MINILLM_CACHE or ~/.cache/minillm.
    Clearing loses nothing: the next run makes what it needs again.
    """
    help_without_command(context)


@cache.command(
    "list", epilog="Examples:\n\nminillm data cache list\n\nminillm data cache list --json"
)
@command
def list_command(as_json: AsJson = False) -> None:
    """List the entries of the token cache: size, tokens, vocabulary, when last used."""
    from minillm_core.cli.console import emit
    from minillm_core.data.store import kept

    folder = _folder()
    entries = kept(folder)
    if as_json:
        emit({"folder": str(folder), **_document(entries)})
        return
    from rich.console import Console

    render(entries, str(folder), Console())


@cache.command(
    "clear",
    epilog="Examples:\n\nminillm data cache clear\n\n"
    "minillm data cache clear 1a942c1f\n\n"
    "minillm data cache clear --json",
)
@command
def clear_command(
    key: Annotated[
        str | None,
        typer.Argument(
            metavar="KEY",
            help="The one entry to remove, or the beginning of its key; default: all.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Remove the entries of the token cache; a run that reads one is not disturbed."""
    from minillm_core.cli.console import emit, write
    from minillm_core.data.store import clear

    folder = _folder()
    removed = clear(folder, key)
    if as_json:
        emit({"folder": str(folder), **_document(removed)})
        return
    size = _size(sum(entry.bytes for entry in removed))
    write(f"{_entries(len(removed))} removed from {folder}: {size} freed")


def render(entries: Sequence[Kept], folder: str, console: Console) -> None:
    """Print the entries as a table, and their total."""
    from rich.table import Table
    from rich.text import Text

    from minillm_core.text import plain

    if entries:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for title in ("key", "size", "tokens", "vocabulary", "made", "last used", "from"):
            right = title in ("size", "tokens", "vocabulary")
            table.add_column(title, justify="right" if right else "left", no_wrap=title != "from")
        for entry in entries:
            table.add_row(
                entry.key[:8],
                _size(entry.bytes),
                "" if entry.tokens is None else f"{entry.tokens:,}",
                "" if entry.vocab is None else f"{entry.vocab:,}",
                _day(entry.made),
                _day(entry.used),
                Text(plain(entry.origin or "") if entry.state == "complete" else entry.state),
            )
        console.print(table)
    total = _size(sum(entry.bytes for entry in entries))
    console.print(Text(f"{_entries(len(entries))}, {total} in {folder}"), soft_wrap=True)


def _document(entries: Sequence[Kept]) -> dict[str, object]:
    from dataclasses import asdict

    return {
        "entries": [asdict(entry) for entry in entries],
        "bytes": sum(entry.bytes for entry in entries),
    }


def _folder() -> Path:
    from minillm_core.config.folders import cache_folder

    return cache_folder() / "tokens"


def _entries(count: int) -> str:
    return f"{count:,} entr{'y' if count == 1 else 'ies'}"


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count < 1e9 else f"{count / 1e9:,.2f} GB"


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).date().isoformat()
