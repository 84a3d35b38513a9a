"""Texts: the documents of some files as a tokenizer takes them, long ones in pieces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from minillm_core import DataError
from minillm_core.documents import (
    Document,
    MalformedError,
    Progress,
    Reading,
    Source,
    ticker,
)
from minillm_data.rows import Malformed, found_in

ANY = 1 << 32
"""Ids of documents that are ids already, where no vocabulary is given, are below this."""


@dataclass
class Texts:
    """The documents of some files, in order, as the tokenizer takes them: long texts in pieces.

    Attributes:
        paths: files or folders.
        malformed: what happens to a document that cannot be read.
        say: prints a line for people.
        sources: the files that were found.
    """

    paths: Sequence[str | Path]
    malformed: Malformed = "strict"
    say: Callable[[str], None] = lambda line: None
    sources: list[Source] = field(init=False)

    def __post_init__(self) -> None:
        self.sources = found_in(self.paths, self.say)
        if shards := [source for source in self.sources if source.format.read is None]:
            raise DataError(
                "this is a token shard already",
                where=str(shards[0].path),
                fix="give the text that it was made from, or train on it as it is",
            )

    def reading(self, what: str, progress: Progress | None, vocab: int) -> Reading:
        """Begin a pass over the files: what :meth:`read` needs."""
        total = sum(source.size for source in self.sources)
        reading = Reading(vocab, ticker(progress, what, total))
        if self.malformed == "skip":
            reading.malformed = count_malformed(reading.notes)
        return reading

    def read(self, reading: Reading) -> Iterator[Document]:
        """Read every document.

        Raises:
            DataError: a file cannot be read, or a document where ``malformed`` is strict.
        """
        for source in self.sources:
            assert source.format.read is not None
            yield from source.format.read(source.path, source.packing, reading)
            source.check_unchanged()


def count_malformed(notes: Counter[str]) -> Callable[[MalformedError], None]:
    """Make the function that counts, by reason, the documents that cannot be read."""

    def count(error: MalformedError) -> None:
        notes[f"left out: {error.reason}"] += 1

    return count
