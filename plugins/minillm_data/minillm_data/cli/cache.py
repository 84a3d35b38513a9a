"""``minillm data cache``: list and clear the token cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minillm_core.commands import AsJson, cache_folder, emit, plain, write

if TYPE_CHECKING:
    from minillm_data.cache import Kept

EXAMPLES = """Examples:

minillm data cache list

minillm data cache list --json

minillm data cache clear

minillm data cache clear 1a942c1f"""


def list_command(as_json: AsJson = False) -> None:
    """List the entries of the token cache: size, tokens, vocabulary, when last used.

    Text is tokenised once, then kept in $MINILLM_CACHE or ~/.cache/minillm.
    """
    from minillm_data.cache import list_cache

    folder = _folder()
    entries = list_cache(folder)
    if as_json:
        _emit(entries, folder)
        return
    for line in _table(entries):
        write(line)
    write(f"{_counted(entries)}, {_size(entries)} in {folder}")


def _table(entries: Sequence[Kept]) -> Iterator[str]:
    """Yield the headings and two lines per entry: its figures, and the name of its text, however long."""
    rows = [("key", "size", "tokens", "vocabulary", "made", "last used")]
    for one in entries:
        counts = ("" if count is None else f"{count:,}" for count in (one.tokens, one.vocab))
        rows.append((one.key[:8], _size([one]), *counts, _day(one.made), _day(one.used)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows if entries else ()):
        cells = zip(row, "<>>><<", widths, strict=True)
        yield "  ".join(f"{cell:{side}{width}}" for cell, side, width in cells).rstrip()
        if number:
            one = entries[number - 1]
            yield f"    {plain(one.origin or '') if one.state == 'complete' else one.state}".rstrip()


def clear_command(
    key: Annotated[
        str | None,
        typer.Argument(
            metavar="KEY",
            help="Key, or prefix of the key, of the entry to remove; default: all.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Remove the entries of the token cache; a run that reads one is not disturbed.

    Nothing is lost: the next run tokenises its data again.
    """
    from minillm_data.cache import clear_cache

    folder = _folder()
    removed = clear_cache(folder, key)
    if as_json:
        _emit(removed, folder)
        return
    write(f"{_counted(removed)} removed from {folder}: {_size(removed)} freed")


def _emit(entries: Sequence[Kept], folder: Path) -> None:
    size = sum(entry.bytes for entry in entries)
    emit({"folder": str(folder), "entries": [asdict(one) for one in entries], "bytes": size})


def _folder() -> Path:
    return cache_folder() / "tokens"


def _counted(entries: Sequence[Kept]) -> str:
    return f"{len(entries):,} entr{'y' if len(entries) == 1 else 'ies'}"


def _size(entries: Sequence[Kept]) -> str:
    count = sum(entry.bytes for entry in entries)
    return f"{count / 1e6:,.1f} MB" if count < 1e9 else f"{count / 1e9:,.2f} GB"


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).date().isoformat()
