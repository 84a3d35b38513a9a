"""Data statistics: documents, tokens, a histogram of lengths, a digest, and sample documents."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from minillm_core import DataError
from minillm_core.documents import (
    Continued,
    Document,
    Progress,
    Reading,
    Source,
    Tokenizer,
    encode_documents,
    map_shard,
    replace_file,
)
from minillm_data.files import ANY, Files, Malformed, size_of
from minillm_data.rows import rows_of

SAMPLES = 3
"""Documents shown by default."""

SHOWN = 600
"""Characters shown per document."""

_SEED = 0
_IDS_SHOWN = 256


@dataclass
class Inspection:
    """Statistics of some data.

    Attributes:
        paths: the given files or folders.
        files: number of files by format.
        documents: number of documents.
        chats: how many of them are chats: the texts of their messages, one per line, without a template.
        tokens: total number of tokens, without the end-of-text ids that begin documents in shards;
            None for text without a tokenizer.
        text_bytes: UTF-8 bytes of the text documents.
        unit: unit of lengths, "tokens", "characters", or "characters or ids" of texts beside ids.
        lengths: mean, and the quantiles 0, 0.1, 0.5, 0.9, 0.99 and 1, by name.
        histogram: (first, last, documents) per power of two.
        largest_id: largest id in documents of ids; None for text alone.
        digest: xxh3-128 of all documents in order: it changes with any character, id or boundary.
        samples: sample documents: index from 0, length, and text.
        notes: counts of skipped documents, by description.
    """

    paths: list[str]
    files: dict[str, int] = field(default_factory=dict)
    documents: int = 0
    chats: int = 0
    tokens: int | None = None
    text_bytes: int = 0
    unit: str = "characters"
    lengths: dict[str, float] = field(default_factory=dict)
    histogram: list[tuple[int, int, int]] = field(default_factory=list)
    largest_id: int | None = None
    digest: str = ""
    samples: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)


def inspect(
    paths: Sequence[str | Path],
    *,
    tokenizer: str | Path | None = None,
    samples: int = SAMPLES,
    malformed: Malformed = "strict",
    say: Callable[[str], None] = lambda line: None,
    progress: Progress | None = None,
) -> Inspection:
    """Read whole data files and compute their statistics.

    Args:
        paths: files or folders of text, JSON lines (texts, ids, chats) or token shards.
        tokenizer: a tokenizer.json that counts tokens of text and decodes ids; default: the one
            beside the shards, if any.
        samples: number of sample documents, drawn with a fixed seed.
        malformed: "strict" or "skip".
        say: prints a line.
        progress: called with the name of the work, the bytes read and the total.

    Raises:
        DataError: the files or the tokenizer cannot be read, or the data are empty.
    """
    files = Files(paths, malformed, say)
    sources = files.sources
    found = Inspection([str(path) for path in paths])
    found.files = dict(Counter(source.format.name for source in sources))
    chosen = _tokenizer(tokenizer, sources, say)
    reading = files.reading("reading", progress)
    tally = _Tally(samples)
    documents = _documents(sources, reading, found, chosen)
    if chosen is None:
        for document in documents:
            tally.add(document, len(document))
    else:
        for document, ids in encode_documents(documents, chosen, reading):
            tally.add(document, len(ids))
    if not tally.lengths:
        raise DataError(
            "the data are empty", where=str(paths[0]), fix="give files with text in them"
        )
    lengths = np.frombuffer(tally.lengths, np.int64)
    ids_alone = tally.texts == 0
    found.documents, found.text_bytes = len(lengths), tally.text_bytes
    without = "characters" if tally.texts == len(lengths) else "characters or ids"
    found.unit = "tokens" if chosen or ids_alone else without
    found.tokens = int(lengths.sum()) if found.unit == "tokens" else None
    found.largest_id = tally.largest_id
    found.lengths = _quantiles(lengths)
    found.histogram = _histogram(lengths)
    found.digest = tally.digest.hexdigest()
    found.samples = [tally.shown(index, chosen) for index in sorted(tally.drawn)]
    found.notes = dict(reading.notes)
    return found


def facts(found: Inspection) -> dict[str, str]:
    """Format the statistics, without histogram and samples, as label -> text."""
    lines = {
        "files": ", ".join(f"{count:,} {name}" for name, count in found.files.items()),
        "documents": f"{found.documents:,}",
    }
    if found.chats:
        lines["chats"] = f"{found.chats:,}, by their messages' texts alone, without a template"
    if found.tokens is not None:
        lines["tokens"] = f"{found.tokens:,}"
    if found.text_bytes:
        lines["text"] = size_of(found.text_bytes)
    if found.text_bytes and found.tokens:
        lines["per token"] = f"{found.text_bytes / found.tokens:.2f} bytes"
    if found.largest_id is not None:
        lines["largest id"] = f"{found.largest_id:,}"
    lines["lengths"] = ", ".join(f"{name} {value:,}" for name, value in found.lengths.items())
    lines["digest"] = found.digest
    lines |= {note.partition(": ")[2]: f"{count:,} left out" for note, count in found.notes.items()}
    return lines


def write_page(found: Inspection, path: Path) -> None:
    """Write the statistics as an HTML page.

    Raises:
        DataError: the page cannot be written.
    """
    from minillm_lab.markup import tag
    from minillm_lab.page import document, section, table
    from minillm_lab.page import facts as listed

    most = max(count for _, _, count in found.histogram)
    rows = (
        (
            f"{first:,}" if first == last else f"{first:,} to {last:,}",
            f"{count:,}",
            tag("meter", min=0, max=most, value=count),
        )
        for first, last, count in found.histogram
    )
    parts = [
        listed(facts(found)),
        section(f"Lengths in {found.unit}", table(["length", ">documents", ""], rows)),
    ]
    for one in found.samples:
        text = tag("pre", one["text"], style="white-space: pre-wrap; overflow-wrap: anywhere")
        heading = f"Document {one['document']:,}, {one['length']:,} {found.unit}"
        parts.append(section(heading, text))
    try:
        content = document(f"Data: {', '.join(found.paths)}", *parts).encode("utf-8", "replace")
        replace_file(path, content)
    except OSError as error:
        raise DataError(
            f"the page cannot be written: {error.strerror or error}",
            where=str(path),
            fix="name another file with --page",
        ) from error


class _Tally:
    """Running statistics over documents; pieces of a long text count as one document."""

    def __init__(self, samples: int) -> None:
        self.lengths, self.digest = array("q"), xxhash.xxh3_128()
        self.texts = self.text_bytes = 0
        self.largest_id: int | None = None
        self.drawn: dict[int, Document] = {}  # a document's index -> its beginning
        self._samples, self._random = samples, random.Random(_SEED)

    def add(self, document: Document, length: int) -> None:
        if isinstance(document, str):
            content = document.encode("utf-8")
            self.text_bytes += len(content)
        else:
            content = document.astype("<u4").tobytes()
            if len(document):
                self.largest_id = max(int(document.max()), self.largest_id or 0)
        if isinstance(document, Continued):
            self.lengths[-1] += length
            self.digest.update(b"+")
        else:
            self._draw(document)
            self.lengths.append(length)
            self.texts += isinstance(document, str)
            self.digest.update(b"t" if isinstance(document, str) else b"i")
        self.digest.update(len(content).to_bytes(8, "little"))
        self.digest.update(content)

    def shown(self, index: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
        document = self.drawn[index]
        if isinstance(document, str):
            text = document
        elif tokenizer:
            text = tokenizer.decode(document)
        else:
            text = " ".join(map(str, document.tolist()))
        return {"document": index, "length": self.lengths[index], "text": text[:SHOWN]}

    def _draw(self, document: Document) -> None:
        """Draw a document by reservoir sampling: keep its beginning with probability samples / documents."""
        number = len(self.lengths)
        short = document[:SHOWN] if isinstance(document, str) else document[:_IDS_SHOWN].copy()
        if number < self._samples:
            self.drawn[number] = short
        elif self._samples and (place := self._random.randrange(number + 1)) < self._samples:
            del self.drawn[sorted(self.drawn)[place]]
            self.drawn[number] = short


def _documents(
    sources: Sequence[Source], reading: Reading, found: Inspection, tokenizer: Tokenizer | None
) -> Iterator[Document]:
    """Read every document; shards are divided as in training.

    The end-of-text id is the tokenizer's, or else the first shard's first id. A shard that begins with
    another id begins inside a document.
    """
    end_of_text = None if tokenizer is None else tokenizer.end_of_text
    for source in sources:
        if source.format.read is None:
            ids, file = map_shard(source.path)
            end_of_text = int(ids[0]) if end_of_text is None else end_of_text
            starts = np.union1d([0], np.flatnonzero(ids == end_of_text))
            for first, last in zip(starts, [*starts[1:], len(ids)], strict=True):
                yield ids[first + int(ids[first] == end_of_text) : last]
                reading.tick(int(last - first) * ids.itemsize)
            file.check_unchanged()
        elif source.format.records is not None:
            for row in rows_of(source, source.format.records, reading):
                found.chats += row.messages is not None
                yield row.document
            source.check_unchanged()
        else:
            yield from source.format.read(source.path, source.packing, reading)
            source.check_unchanged()


def _tokenizer(
    named: str | Path | None, sources: Sequence[Source], say: Callable[[str], None]
) -> Tokenizer | None:
    if named is not None:
        return Tokenizer.load(Path(named).expanduser(), ANY)
    folders = {source.path.parent for source in sources if source.format.read is None}
    beside = [folder / "tokenizer.json" for folder in sorted(folders)]
    if len(beside) != 1 or not beside[0].exists():
        return None
    say(f"ids are decoded with {beside[0]}")
    return Tokenizer.load(beside[0], ANY)


def _quantiles(lengths: np.ndarray) -> dict[str, float]:
    points = {"shortest": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "p99": 0.99, "longest": 1.0}
    values = np.quantile(lengths, list(points.values()), method="inverted_cdf")
    return {
        "mean": round(float(lengths.mean()), 1),
        **dict(zip(points, map(int, values), strict=True)),
    }


def _histogram(lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """Count documents in power-of-two bins of length: 0, 1, 2 to 3, 4 to 7, ..."""
    kinds = np.where(lengths > 0, np.frexp(lengths.astype(np.float64))[1], 0)  # bit lengths
    counts = np.bincount(kinds)
    first = [0, *(1 << kind for kind in range(len(counts) - 1))]
    last = [0, *((1 << kind + 1) - 1 for kind in range(len(counts) - 1))]
    whole = list(zip(first, last, counts.tolist(), strict=True))
    return whole[int(np.flatnonzero(counts)[0]) :]
