"""Text to token shards: what ``minillm train --data DIR`` then maps without reading any text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from minillm_core import DataError
from minillm_core.documents import (
    Continued,
    Document,
    MalformedError,
    Progress,
    Reading,
    Source,
    Tokenizer,
    encode_documents,
    find,
    ticker,
    write_shard,
)
from minillm_data.output import Output, key_of
from minillm_data.rows import Malformed

SHARD_TOKENS = 1 << 24
"""Tokens of a shard, about: 32 MiB of them in two bytes each. A document is in one shard."""

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
        self.sources = find([str(path) for path in self.paths], self.say)
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

            def count(error: MalformedError) -> None:
                reading.notes[f"left out: {error.reason}"] += 1

            reading.malformed = count
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


def tokenize(
    paths: Sequence[str | Path],
    to: str | Path,
    *,
    tokenizer: str | Path | None = None,
    vocab: int | None = None,
    malformed: Malformed = "strict",
    say: Callable[[str], None] = lambda line: None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Encode the documents of some files into token shards; after a kill the same call goes on.

    Args:
        paths: files or folders of text or JSON lines.
        to: the folder to write: shards, tokenizer.json, report.json.
        tokenizer: a tokenizer.json; None where all documents are ids.
        vocab: ids are below it; default: the tokenizer's size, or 65,536 for ids alone.
        malformed: "strict" or "skip".
        say: prints a line for people.
        progress: called with the work's name, the bytes read and those in all.

    Returns:
        The report: documents, tokens, bytes, shards, notes, the tokenizer's digest.

    Raises:
        DataError: something about the files, the tokenizer or the folder.
    """
    texts = Texts(paths, malformed, say)
    chosen = None if tokenizer is None else Tokenizer.load(Path(tokenizer).expanduser(), vocab or ANY)
    ids_below = vocab or (chosen.size if chosen else 1 << 16)
    end_of_text = chosen.end_of_text if chosen else 0
    if chosen:
        say(f"tokenising with {chosen.encoder}")
    digest = chosen.digest if chosen else None
    key = key_of("tokenize", texts.sources, tokenizer=digest, vocab=ids_below, malformed=malformed)
    with Output(Path(to), key) as output:
        if output.note:
            say(output.note)
        reading = texts.reading("tokenising", progress, ids_below)
        shard = _Shard(output, ids_below)
        documents = _after(output.state.rows, texts.read(reading))
        for document, ids in encode_documents(_checked(documents, chosen), chosen, reading):
            if not isinstance(document, Continued):
                shard.end_document()
                if len(ids) == 0 or int(ids[0]) != end_of_text:
                    shard.add(np.array([end_of_text]))
                shard.documents += 1
            shard.add(ids)
        shard.end_document()
        shard.close()
        counts = output.state.counts
        if not counts["tokens"]:
            raise DataError("the data are empty", where=str(paths[0]), fix="give files with text")
        if chosen:
            chosen.save(output.folder / "tokenizer.json")
        report = {
            "command": "tokenize",
            "paths": [str(path) for path in paths],
            "documents": counts["documents"],
            "tokens": counts["tokens"],
            "bytes": sum(source.size for source in texts.sources),
            "shards": list(output.state.parts),
            "vocab": ids_below,
            "end_of_text": end_of_text,
            "tokenizer": digest,
            "notes": dict(reading.notes),
        }
        output.finish(report)
    return report


class _Shard:
    """The shard that is being filled: its ids in memory, written when it is full."""

    def __init__(self, output: Output, vocab: int) -> None:
        self._output, self._vocab = output, vocab
        self._dtype = np.uint16 if vocab <= 1 << 16 else np.uint32
        self._ids: list[np.ndarray] = []
        self._tokens = self.documents = 0

    def add(self, ids: np.ndarray) -> None:
        self._ids.append(ids.astype(self._dtype))
        self._tokens += len(ids)

    def end_document(self) -> None:
        """Close the shard behind a document if it is full."""
        if self._tokens >= SHARD_TOKENS:
            self.close()

    def close(self) -> None:
        if not self._tokens:
            return
        state = self._output.state
        name = f"part-{len(state.parts):05d}.bin"
        try:
            write_shard(self._output.folder / name, np.concatenate(self._ids), self._vocab)
        except OSError as error:
            raise self._output.unwritable(error) from error
        state.rows += self.documents
        state.counts.update(documents=self.documents, tokens=self._tokens)
        self._ids, self._tokens, self.documents = [], 0, 0
        self._output.commit(name)


def _after(count: int, documents: Iterator[Document]) -> Iterator[Document]:
    """Pass over the first documents, with all their pieces."""
    for document in documents:
        if not isinstance(document, Continued):
            count -= 1
        if count < 0:
            yield document


def _checked(documents: Iterator[Document], tokenizer: Tokenizer | None) -> Iterator[Document]:
    for document in documents:
        if tokenizer is None and isinstance(document, str):
            raise DataError(
                "the data hold text, and no tokenizer is named",
                where="--tokenizer",
                fix="minillm data train-tokenizer PATH --to tokenizer.json makes one",
            )
        yield document
