"""The files that some paths name, and one pass over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from minillm_core import DataError
from minillm_core.documents import MalformedError, Progress, Reading, Source, find, ticker

Malformed = Literal["strict", "skip"]
"""What happens to a document that cannot be read: an error with file, line and byte; or it is counted."""

ANY = 1 << 32
"""Ids of documents that are ids already, where no vocabulary is given, are below this."""


@dataclass
class Files:
    """The files that some paths name, in order.

    Attributes:
        paths: files or folders.
        malformed: what happens to a document that cannot be read.
        say: prints a line for people.
        sources: the files that were found.
    """

    no_shards: ClassVar[tuple[str, str] | None] = None
    """What is wrong with token shards here, and what to give instead; None: nothing."""

    paths: Sequence[str | Path]
    malformed: Malformed = "strict"
    say: Callable[[str], None] = lambda line: None
    sources: list[Source] = field(init=False)

    def __post_init__(self) -> None:
        """Find the files.

        Raises:
            DataError: no path is given, one does not exist, a folder holds no data, or a file is a
                token shard where there should be none.
        """
        if not self.paths:  # find() would give the text that a run without --data trains on
            raise DataError("no file is named", where="the paths", fix="name files or folders")
        self.sources = find([str(path) for path in self.paths], self.say)
        shards = [source for source in self.sources if source.format.read is None]
        if shards and self.no_shards:
            what, fix = self.no_shards
            raise DataError(what, where=str(shards[0].path), fix=fix)

    @property
    def size(self) -> int:
        """Count the bytes of all files."""
        return sum(source.size for source in self.sources)

    def reading(self, what: str, progress: Progress | None, vocab: int = ANY) -> Reading:
        """Begin a pass over the files: what the reader of a format needs.

        Args:
            what: the name of the work, for its progress.
            progress: called with ``what``, the bytes read and those in all.
            vocab: ids must be smaller.
        """
        reading = Reading(vocab, ticker(progress, what, self.size))
        if self.malformed == "skip":
            reading.malformed = _counting(reading.notes)
        return reading


def _counting(notes: Counter[str]) -> Callable[[MalformedError], None]:
    def count(error: MalformedError) -> None:
        notes[f"left out: {error.reason}"] += 1

    return count
