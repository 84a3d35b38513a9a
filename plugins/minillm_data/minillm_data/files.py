"""The data files of given paths, and a pass over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from minillm_core import DataError
from minillm_core.commands import counted, few
from minillm_core.documents import MalformedError, Progress, Reading, Source, find, ticker

Malformed = Literal["strict", "skip"]
"""Handling of documents that cannot be read: an error with file, line and byte; or skip and count."""

ANY = 1 << 32
"""Exclusive upper bound of ids in documents of ids, without a given vocabulary."""


@dataclass
class Files:
    """The data files of given paths, in order.

    Attributes:
        paths: files or folders.
        malformed: handling of documents that cannot be read.
        say: prints a line.
        sources: the files found.
    """

    no_shards: ClassVar[tuple[str, str] | None] = None
    """The error and the fix for token shards, if not supported; None: supported."""

    paths: Sequence[str | Path]
    malformed: Malformed = "strict"
    say: Callable[[str], None] = lambda line: None
    sources: list[Source] = field(init=False)

    def __post_init__(self) -> None:
        """Find the files.

        Raises:
            DataError: no path is given, one does not exist, a folder holds no data, or a file is an
                unsupported token shard.
        """
        if not self.paths:  # find() would return the default training text of a run without --data
            raise DataError("no file is named", where="the paths", fix="name files or folders")
        self.sources = find([str(path) for path in self.paths], self.say)
        shards = [source for source in self.sources if source.format.read is None]
        if shards and self.no_shards:
            what, fix = self.no_shards
            raise DataError(what, where=str(shards[0].path), fix=fix)
        tell_repeated(self.sources, self.say)

    @property
    def size(self) -> int:
        """Return the total bytes of all files."""
        return sum(source.size for source in self.sources)

    def reading(self, what: str, progress: Progress | None, vocab: int = ANY) -> Reading:
        """Begin a pass over the files; return the arguments of a format's reader.

        Args:
            what: the name of the work, for its progress.
            progress: called with ``what``, the bytes read and the total.
            vocab: exclusive upper bound of ids.
        """
        reading = Reading(vocab, ticker(progress, what, self.size))
        if self.malformed == "skip":
            reading.malformed = _counting(reading.notes)
        return reading


def tell_repeated(sources: Sequence[Source], say: Callable[[str], None]) -> None:
    """Name the files that are given more than once, by their resolved paths."""
    given = Counter(str(source.path.resolve()) for source in sources)
    if again := [path for path, count in given.items() if count > 1]:
        say(f"given more than once: {few(again)}; each time the documents are read again")


def _counting(notes: Counter[str]) -> Callable[[MalformedError], None]:
    def count(error: MalformedError) -> None:
        notes[f"left out: {error.reason}"] += 1

    return count


def size_of(count: int) -> str:
    """Format bytes of text: ``1 byte``, ``24.3 kB``, ``1,234.5 MB``."""
    if count < 1e3:
        return counted(count, "byte")
    return f"{count / 1e3:,.1f} kB" if count < 1e6 else f"{count / 1e6:,.1f} MB"
