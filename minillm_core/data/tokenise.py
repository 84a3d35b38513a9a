"""From source files to token ids: streamed, so that no corpus has to fit into memory, and kept.

The files are read once to check every document, and to draw a sample for a tokenizer, where none
is given; and once to encode. The next batch is read while the last one is encoded on all cores.
What was made from the same files under the same tokenizer is mapped from the cache.
"""

from __future__ import annotations

import heapq
import json
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers

from minillm_core.data.bpe import frame, frames
from minillm_core.data.cutting import Continued
from minillm_core.data.documents import Documents, MappedFile, digest
from minillm_core.data.formats import EMPTY, Document, Progress, Reading, ticker
from minillm_core.data.shards import check_ids, map_shard, starts
from minillm_core.data.sources import Source, find
from minillm_core.data.store import Digests, Entry, Writer, open_entry, sweep
from minillm_core.data.tokenizer import Tokenizer, grouped
from minillm_core.errors import DataError
from minillm_core.text import plain

_PLURAL = re.compile(r"(?<=document)s|(?<=line)s|(?<=word)s|(?<=time)s")  # in a note

_VERSION = 4
"""Of everything that turns files into ids; another one makes the cache anew."""

SAMPLE = 64 << 20
"""Bytes of text, at the most, that a tokenizer is trained on."""

_RUN = 1 << 14  # bytes; shorter documents are drawn with their neighbours
_SEED = 0  # of the sample: one text, one tokenizer, whatever data.seed is
_BATCH = 1 << 19  # characters and ids encoded together
_SECONDS = 0.25  # between two reports while a batch is waited for


@dataclass
class TokenCache:
    """A cache of the tokens of some files, on disk.

    Attributes:
        paths: files or folders; none for the standard library.
        vocab: ids are smaller.
        folder: the folder that keeps tokens and tokenizers.
        say: prints notes that a person should read, line by line.
        detail: prints notes that need no action: the tokenizer's choice, empty documents.
        progress: called with how far each phase has come.
        sources: the files that were found.
        where: their name in messages.
        path_of: int64 (documents,): which of ``paths`` each document is from; None before there are any.
    """

    paths: Sequence[str]
    vocab: int
    folder: Path
    say: Callable[[str], None]
    detail: Callable[[str], None]
    progress: Progress | None
    path_of: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.sources = find(self.paths, self.say)
        count = len(self.paths)
        names = [*self.paths[:3], f"and {count - 3} more"] if count > 3 else self.paths
        self.where = ", ".join(names) or "the standard library"

    def documents(self, tokenizer: Tokenizer | None, end_of_text: int) -> Documents:
        """Return the documents under a given tokenizer; without one, all must be ids.

        Raises:
            DataError: something about the files or the cache.
        """
        entry = self._entry([tokenizer.digest if tokenizer else None, end_of_text])
        opened = self._open(entry) or self._make(entry, tokenizer, end_of_text, (0, 0))
        return opened.documents

    def documents_and_tokenizer(self) -> tuple[Documents, Tokenizer | None, int]:
        """Return the documents under a tokenizer trained on them, it, and the id that begins each.

        Neither depends on the validation part: losses of runs with another data.val or data.seed
        are in the same units.

        Returns:
            No tokenizer where there is no text.

        Raises:
            DataError: something about the files or the cache.
        """
        entry = self._entry(["trained", SAMPLE, tokenizers.__version__])
        opened = self._open(entry)
        if opened is None:
            tokenizer, sample = self._train()
            end_of_text = tokenizer.end_of_text if tokenizer else self.end_of_text
            opened = self._make(entry, tokenizer, end_of_text, sample)
        if opened.tokenizer is None:
            self.say(f"no tokenizer: documents begin with id {opened.end_of_text}")
            return opened.documents, None, opened.end_of_text
        tokenizer = Tokenizer.load(opened.tokenizer, self.vocab)
        drawn, total = opened.sample
        on = "this text"
        if drawn < total:
            on = f"a sample of {drawn / 1e6:,.1f} MB of the {total / 1e6:,.1f} MB of this text"
        self.detail(
            f"a byte-level BPE of {tokenizer.size:,} entries, trained on {on}, is in "
            f"{opened.tokenizer}"
        )
        return opened.documents, tokenizer, tokenizer.end_of_text

    @property
    def end_of_text(self) -> int:
        """Return the end-of-text id without a tokenizer: the first shard's first id, else 0."""
        return int(self._shards[0][0][0]) if self._shards else 0

    @cached_property
    def _shards(self) -> list[tuple[np.ndarray, MappedFile]]:
        return [map_shard(source.path) for source in self._mapped]

    @property
    def _mapped(self) -> list[Source]:
        return [source for source in self.sources if source.format.read is None]

    @cached_property
    def _digests(self) -> dict[Source, str]:
        total = sum(source.size for source in self.sources)
        tick = ticker(self.progress, "checking the files", total)
        with self._writing():
            digests = Digests(self.folder)
            found = {source: digests.of(source, tick) for source in self.sources}
            self.folder.mkdir(parents=True, exist_ok=True)
            digests.keep()
        return found

    def _entry(self, rule: list[object]) -> Path:
        digests = [self._digests[source] for source in self.sources]
        files = [*Counter(source.given for source in self.sources).values()]  # of each path
        key = [_VERSION, self.vocab, digests, files, rule]
        return self.folder / "tokens" / digest(json.dumps(key))

    def _open(self, entry: Path) -> Entry | None:
        content = digest(" ".join(self._digests[source] for source in self._mapped))
        with self._writing():
            sweep(entry.parent)
            opened = open_entry(entry, self._shards, self.vocab, content, self.say, self.progress)
        for source in self._mapped:
            source.check_unchanged()
        self.path_of = opened.paths if opened else None
        for note, count in sorted(opened.notes.items()) if opened else ():
            tell = self.detail if note == EMPTY else self.say
            what, _, which = note.partition(": ")
            which = _PLURAL.sub("", which, 1) if count == 1 else which
            tell(f"{what}: {count:,} {which}")
        return opened

    def _make(
        self, entry: Path, tokenizer: Tokenizer | None, end_of_text: int, sample: tuple[int, int]
    ) -> Entry:
        reading = self._reading("tokenising")
        with self._writing(), Writer(entry, self.vocab, plain(self.where)) as writer:
            documents = self._encode(tokenizer, end_of_text, reading, writer)
            for source in self.sources:
                source.check_unchanged()
            if not writer.documents:
                raise DataError(
                    "the data are empty", where=self.where, fix="give files with text in them"
                )
            writer.commit(end_of_text, dict(reading.notes), tokenizer, sample, documents)
        opened = self._open(entry)
        if opened is None:
            raise DataError(
                "the cache did not keep what was written to it",
                where=str(entry),
                fix="check the disk that it is on",
            )
        return opened

    def _train(self) -> tuple[Tokenizer | None, tuple[int, int]]:
        """Read and check every document, and train a tokenizer on a sample; None: there is no text."""
        sample = Sample()
        for document in self._documents(self._reading("reading")):
            sample.add(document)
        sample.draw()
        if not sample.total:
            return None, (0, 0)
        if sample.ids or self._mapped:
            raise DataError(
                "the data hold text and ids, and a tokenizer trained here would not be theirs",
                where=self.where,
                fix="name the tokenizer that the ids were made with: data.tokenizer=PATH",
            )
        beat = ticker(self.progress, "training the tokenizer", 0)
        tokenizer = Tokenizer.train(sample.texts(), self.vocab, lambda: beat(0))
        return tokenizer, (sample.drawn, sample.total)

    def _encode(
        self, tokenizer: Tokenizer | None, end_of_text: int, reading: Reading, writer: Writer
    ) -> list[tuple[int, int]]:
        """Write the ids of every document: those of the files that are read, then the shards'.

        Returns:
            (number of a path, documents from it), in their order.
        """
        if tokenizer and self.detail is not self.say:  # not worth a line of its own elsewhere
            self.detail(f"tokenising with {tokenizer.encoder}")
        read = Counter[int]()
        documents = self._documents(reading, text=tokenizer is not None, read=read)
        for document, ids in encode_documents(documents, tokenizer, reading):
            if isinstance(document, Continued):
                writer.more(ids)
            else:
                writer.document(end_of_text, ids)
        total = sum(ids.nbytes for ids, _ in self._shards)
        tick = ticker(self.progress if self._shards else None, "checking the files", total)
        mapped = []
        for source, (ids, file) in zip(self._mapped, self._shards, strict=True):
            check_ids(ids, self.vocab, file.path, tick)
            begins = starts(ids, end_of_text)
            writer.shard(begins, len(ids))
            mapped.append((source.given, len(begins)))
        return [*sorted(read.items()), *mapped]

    def _documents(
        self, reading: Reading, text: bool = True, read: Counter[int] | None = None
    ) -> Iterator[Document]:
        """Read the documents of all files that are not mapped; refuse text unless it is expected.

        Args:
            reading: bounds, progress and notes.
            text: it is expected.
            read: documents from each path, counted.
        """
        for source in self.sources:
            if source.format.read is None:
                continue
            for document in source.format.read(source.path, source.packing, reading):
                if isinstance(document, str) and not text:
                    raise DataError(
                        "the data hold text, and there is no tokenizer: the model is one of ids "
                        "alone",
                        where=str(source.path),
                        fix="give ids; or train with data.tokenizer=PATH, the one the ids were "
                        "made with",
                    )
                if read is not None and not isinstance(document, Continued):
                    read[source.given] += 1
                yield document

    def _reading(self, what: str) -> Reading:
        total = sum(source.size for source in self.sources if source.format.read)
        return Reading(self.vocab, ticker(self.progress if total else None, what, total))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"the cache cannot be written: {error.strerror or error}",
                where=str(self.folder),
                fix="make room there, or make it writable; MINILLM_CACHE names another folder",
            ) from error


def encode_documents(
    documents: Iterable[Document], tokenizer: Tokenizer | None, reading: Reading
) -> Iterator[tuple[Document, np.ndarray]]:
    """Encode documents in order: the next ones are read while the last ones are encoded on all cores.

    Args:
        documents: text, or ids, which come as they are.
        tokenizer: None where all are ids.
        reading: whose notes count what was cut, and whose ``tick`` is called while it encodes.

    Yields:
        Each document and its ids, int (tokens,), without an end-of-text id.
    """
    pool, stop = ThreadPoolExecutor(1), threading.Event()

    def ids_of(batch: list[Document]) -> list[np.ndarray]:
        texts = [document for document in batch if isinstance(document, str)]
        encoded = iter(tokenizer.encode(texts, reading.notes, stop.is_set) if tokenizer else [])
        return [next(encoded) if isinstance(d, str) else d for d in batch]

    def finished(
        batch: list[Document], encoded: Future[list[np.ndarray]]
    ) -> Iterator[tuple[Document, np.ndarray]]:
        while not wait([encoded], _SECONDS).done:
            reading.tick(0)
        return zip(batch, encoded.result(), strict=True)

    pending: tuple[list[Document], Future[list[np.ndarray]]] | None = None
    try:
        for batch in grouped(documents, len, _BATCH):
            encoded = pool.submit(ids_of, batch)
            if pending:
                yield from finished(*pending)
            pending = batch, encoded
        if pending:
            yield from finished(*pending)
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


class Sample:
    """A sample of a corpus's text: all of it up to SAMPLE bytes, else whole documents drawn evenly.

    Each document, or piece of a long text file, or run of short documents gets a random number;
    those with the lowest are the sample, in their order in the files.

    Attributes:
        ids: documents that are ids already.
        drawn: bytes of text in the sample.
        total: bytes of text in all.
    """

    def __init__(self) -> None:
        self.ids = self.drawn = self.total = 0
        self._random = random.Random(_SEED)
        self._lowest_left_out = 1.0
        self._heap: list[tuple[float, int, bytes]] = []  # the highest number first
        self._run: list[bytes] = []
        self._size = self._count = 0

    def add(self, document: Document) -> None:
        """Look at the next document."""
        if not isinstance(document, str):
            self.ids += 1
            return
        data = frame(document)
        self._run.append(data)
        self._size += len(data)
        if self._size >= _RUN:
            self.draw()

    def texts(self) -> Iterator[str]:
        """Yield the texts drawn, in order."""
        for _, _, data in sorted(self._heap, key=lambda run: run[1]):
            yield from frames(data)

    def draw(self) -> None:
        """Draw, or leave out, the documents since the last time."""
        number, size, self._count = self._random.random(), self._size, self._count + 1
        self.total += size
        if size and number < self._lowest_left_out:
            heapq.heappush(self._heap, (-number, self._count, b"".join(self._run)))
            self.drawn += size
            while self.drawn > SAMPLE and len(self._heap) > 1:
                highest, _, data = heapq.heappop(self._heap)
                self._lowest_left_out = -highest
                self.drawn -= len(data)
        self._run, self._size = [], 0
