"""Tokenise source files to cached ids, streaming, so that no corpus has to fit into memory.

The files are read once to check every document, and to draw a sample for training a tokenizer, if none is
given; and once to encode. The next batch is read while the last one is encoded on all cores. Tokens are
stored in blocks of whole documents, each committed when it is full: the tokens of the same files and
tokenizer are mapped from the cache, and a start after a kill continues after the last block.
"""

from __future__ import annotations

import heapq
import io
import json
import random
import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from minillm_core.data import store
from minillm_core.data.bpe import frame, frames
from minillm_core.data.cutting import Continued
from minillm_core.data.documents import Documents, MappedFile, digest
from minillm_core.data.formats import EMPTY, Document, Progress, Reading, ticker
from minillm_core.data.shards import check_ids, map_shard, starts
from minillm_core.data.sources import Source, find, stated_end_of_text
from minillm_core.data.tokenizer import Tokenizer, grouped
from minillm_core.errors import DataError
from minillm_core.nn.reference import Function
from minillm_core.plugins.sourcing import PLAIN, WEIGHTS, Segment, Sourcing, Special
from minillm_core.text import plain, quoted

_PLURAL = re.compile(r"(?<=document)s|(?<=line)s|(?<=word)s|(?<=time)s")  # in a note

_VERSION = 5
"""Version of the conversion from files to ids; a change invalidates the cache."""

SAMPLE = 64 << 20
"""Most bytes of text that a tokenizer is trained on."""

_RUN = 1 << 14  # bytes; shorter documents are sampled together with their neighbours
_SEED = 0  # of the sample: the tokenizer depends on the text, not on data.seed
_BATCH = 1 << 19  # characters and ids encoded together
_BLOCK = 1 << 26  # tokens of a block if ``data.block`` is not set
_TEXT = 4  # approximate bytes of a token: a tokenizer of blocks is trained on the first one
_SECONDS = 0.25  # between two reports during encoding


class _DocumentStart(NamedTuple):
    """The start of a document: the index of its path, and the place after it."""

    path: int
    after: store.Bookmark


class Encoding(NamedTuple):
    """The parameters that turn documents into ids."""

    tokenizer: Tokenizer | None  # None: they are ids
    end_of_text: int  # the id that begins each document
    sample: tuple[int, int] = (0, 0)  # bytes of text to train the tokenizer on, and in all


@dataclass
class TokenCache:
    """A cache of the tokens of some files, on disk.

    Attributes:
        paths: files or folders; none for the standard library.
        vocab: upper bound of ids.
        folder: the folder of tokens and tokenizers.
        say: prints notes for the user, line by line.
        detail: prints notes that need no action: the tokenizer's choice, empty documents.
        progress: takes the progress of each phase.
        asked: what plugins require of the documents.
        sources: the files that were found.
        where: their name in messages.
        block: fewest tokens of a block, if blocks are read one by one; 0: all are joined.
        path_of: int64 (documents,): index in ``paths`` of each document; None before there are any.
    """

    paths: Sequence[str]
    vocab: int
    folder: Path
    say: Callable[[str], None]
    detail: Callable[[str], None]
    progress: Progress | None
    asked: Sourcing = PLAIN
    block: int = 0
    path_of: np.ndarray | None = None

    def __post_init__(self) -> None:
        count, source = len(self.paths), self.asked.source
        self._notes: Counter[str] = Counter()
        if count and not self.asked.files:
            raise DataError(
                f"the documents come from plugin '{source and source.owner}', which reads no files",
                where=f"the data: {', '.join(self.paths)}",
                fix="leave the paths out: no --data, and a fraction as data.val",
            )
        self.sources = find(self.paths, self.say) if self.asked.files else []
        names = [*self.paths[:3], f"and {count - 3} more"] if count > 3 else self.paths
        whose = f"plugin '{source.owner}'" if source else "the standard library"
        self.where = ", ".join(names) or whose

    def documents(self, tokenizer: Tokenizer | None, end_of_text: int) -> Documents:
        """Return the documents under a given tokenizer; without one, all must be ids.

        Those of the first block, if blocks are read one by one.

        Raises:
            DataError: an error of the files or the cache.
        """
        key = self._key([tokenizer.digest if tokenizer else None, end_of_text])
        return self._joined([*self._entries(key, lambda: Encoding(tokenizer, end_of_text))])

    def documents_and_tokenizer(self) -> tuple[Documents, Tokenizer | None, int]:
        """Return the documents under a tokenizer trained on them, the tokenizer, and the id that begins each.

        Neither depends on the held-out part: losses of runs with another data.val or data.seed are in the same
        units.

        Returns:
            No tokenizer if there is no text.

        Raises:
            DataError: an error of the files or the cache.
        """
        reserved = sorted({one.text for one in self.asked.specials})
        key = self._key(["trained", SAMPLE, tokenizers.__version__, *reserved])
        entries = list[store.Entry]()

        def encoding() -> Encoding:
            first = entries[0] if entries else None
            trained, sample = (None, first.sample) if first else self._train()
            if first and first.tokenizer:
                trained = Tokenizer.load(first.tokenizer, self.vocab)
            return Encoding(trained, trained.end_of_text if trained else self.end_of_text, sample)

        for entry in self._entries(key, encoding):
            entries.append(entry)
        documents, first = self._joined(entries), entries[0]
        if first.tokenizer is None:
            self.say(f"no tokenizer: documents begin with id {first.end_of_text}{self._beside}")
            return documents, None, first.end_of_text
        found = Tokenizer.load(first.tokenizer, self.vocab)
        drawn, total = first.sample
        on = "this text"
        if drawn < total:
            on = f"a sample of {drawn / 1e6:,.1f} MB of the {total / 1e6:,.1f} MB of this text"
        if self.block and first.place:
            on = f"{drawn / 1e6:,.1f} MB of the beginning of this text"
        self.detail(
            f"a byte-level BPE of {found.size:,} entries, trained on {on}, is in {first.tokenizer}"
        )
        return documents, found, found.end_of_text

    @property
    def end_of_text(self) -> int:
        """The end-of-text id without a tokenizer: the first shard's first id, else the one stated, else 0."""
        return int(self._shards[0][0][0]) if self._shards else stated_end_of_text(self.sources)

    @property
    def _beside(self) -> str:
        """A hint at the tokenizer.json beside the ids, with its settings; empty: none, or several folders."""
        found = {one.path.with_name("tokenizer.json") for one in self.sources}
        with suppress(DataError):  # it is missing, or of another kind
            for path in found if len(found) == 1 else ():
                size = Tokenizer.load(path, 1 << 31).size
                return f"; to use the one beside them: data.tokenizer={quoted(path)} model.vocab={size}"
        return ""

    @cached_property
    def _shards(self) -> list[tuple[np.ndarray, MappedFile]]:
        return [map_shard(source.path) for source in self._mapped]

    @property
    def _mapped(self) -> list[Source]:
        mapped = [source for source in self.sources if source.format.read is None]
        return [] if self.asked.source else mapped

    @cached_property
    def digests(self) -> dict[Source, str]:
        """The digest of each file's content and format."""
        total = sum(source.size for source in self.sources)
        tick = ticker(self.progress, "checking the files", total)
        with self._writing():
            digests = store.Digests(self.folder)
            found = {source: digests.of(source, tick) for source in self.sources}
            self.folder.mkdir(parents=True, exist_ok=True)
            digests.keep()
        return found

    def _key(self, rule: list[object]) -> str:
        digests = [self.digests[source] for source in self.sources]
        files = [*Counter(source.given for source in self.sources).values()]  # number, by path
        key = [_VERSION, self.vocab, digests, files, rule, self.block, *self.asked.key]
        key += [s.path.parts[-2:] for s in self.sources] if self.asked.source else []
        return digest(json.dumps(key))

    def folder_of(self, key: str, number: int) -> Path:
        """Return the folder of a block, by its index."""
        return self.folder / "tokens" / (digest(f"{key} {number}") if number else key)

    def _entries(self, key: str, encoding: Callable[[], Encoding]) -> Iterator[store.Entry]:
        """Open or make each block in turn; only the first, if blocks are read one by one.

        Args:
            key: digest of their inputs.
            encoding: returns the parameters to make them with.
        """
        self.key, number, making = key, 0, None
        with self._writing():
            store.sweep(self.folder / "tokens")
        place: store.Bookmark | None = store.BEGIN
        self._notes.clear()
        while place is not None and not (number and self.block):
            folder = self.folder_of(key, number)
            if (entry := self._open(folder, self.progress)) is None:
                making = making or self.made(key, number, place, encoding())
                next(making)
                entry = self._open(folder, self.progress)
            if entry is None:
                what = "the cache did not keep what was written to it"
                raise DataError(what, where=str(folder), fix="check the disk that it is on")
            yield entry
            number, place = number + 1, entry.place
        for note, count in sorted(self._notes.items()):
            tell = self.detail if note == EMPTY else self.say
            what, _, which = note.partition(": ")
            which = _PLURAL.sub("", which, 1) if count == 1 else which
            tell(f"{what}: {count:,} {which}")

    def _joined(self, entries: Sequence[store.Entry]) -> Documents:
        """Join the documents of consecutive blocks."""
        self.path_of = np.concatenate([one.paths for one in entries])
        self.first = entries[0]
        parts = [one.documents for one in entries]
        if len(parts) == 1:
            return parts[0]
        # arrays of the parts before each
        before = np.cumsum([0, *(len(one.arrays) for one in parts)])
        spans = [a.spans + np.array([at, 0, 0]) for a, at in zip(parts, before, strict=False)]
        return Documents(
            tuple(array for one in parts for array in one.arrays),
            np.concatenate(spans),
            self.vocab,
            digest(" ".join(one.digest for one in parts)),
            tuple(file for one in parts for file in one.files),
        )

    def opened(self, number: int) -> store.Entry | None:
        """Open a block of the same tokens as the last opened ones; None: it is not made yet."""
        folder = self.folder_of(self.key, number)
        return self._open(folder, None) if folder.exists() else None

    def _open(self, folder: Path, progress: Progress | None) -> store.Entry | None:
        content = digest(" ".join(self.digests[source] for source in self._mapped))
        with self._writing():
            given = {"shards": self._shards, "vocab": self.vocab, "fields": self.asked.fields}
            opened = store.open_entry(folder, self.say, content=content, progress=progress, **given)
        for source in self._mapped:
            source.check_unchanged()
        self._notes.update(opened.notes if opened else {})
        return opened

    def made(self, key: str, number: int, place: store.Bookmark, by: Encoding) -> Iterator[None]:
        """Make the blocks from ``number`` on, starting with the document at ``place``.

        Yields:
            At each commit of a block.

        Raises:
            DataError: an error of the files or the cache.
        """
        tokenizer, end_of_text, sample = by
        if tokenizer and self.detail is not self.say:  # not worth a line of its own elsewhere
            self.detail(f"tokenising with {tokenizer.encoder}")
        specials = {"end_of_text": end_of_text}
        if tokenizer:
            specials = tokenizer.reserve(self.asked.specials, self.vocab)
        reading, size = self._reading("tokenising"), self.block or _BLOCK
        ahead = deque[tuple[_DocumentStart | None, store.Values]]()  # parts being encoded
        noted, after, paths = Counter[str](), place, Counter[int]()

        def parts() -> Iterator[Document]:
            text = tokenizer is not None
            for begins, part, values in self._parts(reading, specials, text, place):
                ahead.append((begins, values))
                yield part

        def commit(last: bool) -> None:
            mapped = self._map(writer, end_of_text) if last else []
            for source in self.sources:
                source.check_unchanged()
            if not writer.documents:
                raise DataError(
                    "the data are empty", where=self.where, fix="give files with text in them"
                )
            facts = {"end_of_text": end_of_text, "sample": sample, "place": None if last else after}
            notes, origins = dict(reading.notes - noted), [*sorted(paths.items()), *mapped]
            writer.commit(tokenizer, notes=notes, paths=origins, **facts)
            noted.update(notes)
            paths.clear()

        fields, origin = self.asked.fields, plain(self.where)
        with self._writing(), ExitStack() as open_one:

            def begin() -> store.CacheWriter:
                open_one.close()  # commits the block before
                return open_one.enter_context(
                    store.CacheWriter(self.folder_of(key, number), self.vocab, origin, fields)
                )

            writer = begin()
            for _, ids in encode_documents(parts(), tokenizer, reading):
                begins, values = ahead.popleft()
                if begins is None:
                    writer.more(ids, values)
                    continue
                if writer.tokens >= size:
                    commit(last=False)
                    yield
                    number += 1
                    writer = begin()
                after = begins.after
                paths[begins.path] += 1
                writer.document(end_of_text, ids, values)
            commit(last=True)
            yield

    def _train(self) -> tuple[Tokenizer | None, tuple[int, int]]:
        """Read and check every document, and train a tokenizer on a sample; None: there is no text.

        Where blocks are read one by one, only about the first block's text is read.
        """
        sample, most = Sample(), self.block * _TEXT or None
        for _, part, _ in self._parts(self._reading("reading", most), None):
            sample.add(part)
            if most and sample.total >= most:
                break
        sample.draw()
        if not sample.total:
            return None, (0, 0)
        if sample.ids or self._mapped:
            raise DataError(
                "the data contain both text and token ids; a newly trained tokenizer would not match the ids",
                where=self.where,
                fix="name the tokenizer that the ids were made with: data.tokenizer=PATH",
            )
        beat = ticker(self.progress, "training the tokenizer", 0)
        texts, special = sample.texts(), self.asked.specials
        tokenizer = Tokenizer.train(texts, self.vocab, lambda: beat(0), special)
        return tokenizer, (sample.drawn, sample.total)

    def _map(self, writer: store.CacheWriter, end_of_text: int) -> list[tuple[int, int]]:
        """Add the documents of mapped shards, whose files stay in place; return their number for each path."""
        total = sum(ids.nbytes for ids, _ in self._shards)
        tick = ticker(self.progress if self._shards else None, "checking the files", total)
        found = []
        for source, (ids, file) in zip(self._mapped, self._shards, strict=True):
            check_ids(ids, self.vocab, file.path, tick)
            begins = starts(ids, end_of_text)
            writer.shard(begins, len(ids))
            found.append((source.given, len(begins)))
        return found

    def _parts(
        self,
        reading: Reading,
        specials: Mapping[str, int] | None,
        text: bool = True,
        place: store.Bookmark = store.BEGIN,
    ) -> Iterator[tuple[_DocumentStart | None, Document, store.Values]]:
        """Read the documents of all files that are not mapped, part by part.

        Args:
            reading: the bound of ids, progress and notes.
            specials: the ids of special tokens; None: they are not known yet, and are left out.
            text: whether text is allowed; else it is refused.
            place: of the first document; earlier ones are skipped.

        Yields:
            The start of a document, None for a further part of one; the part, text or ids; and the values
            of its fields.
        """
        for where, begins, found in self._documents(reading, specials, place):
            for part, values in found:
                if isinstance(part, str) and not text:
                    raise DataError(
                        "the data contain text, but there is no tokenizer: the model was trained "
                        "on ids",
                        where=where,
                        fix="give ids; or train with data.tokenizer=PATH, the tokenizer that made "
                        "the ids",
                    )
                yield None if isinstance(part, Continued) else begins, part, values
                begins = None
            if begins is not None:
                reading.notes[EMPTY] += 1

    def _documents(
        self, reading: Reading, specials: Mapping[str, int] | None, place: store.Bookmark
    ) -> Iterator[tuple[str, _DocumentStart | None, Iterable[tuple[Document, store.Values]]]]:
        """Yield the file of each document, its start, and its parts."""
        source = self.asked.source
        for number, group in enumerate(self._groups()):
            if number < place[0]:
                reading.tick(sum(file.size for file in group))
                continue
            count, passed = 0, place[1] if number == place[0] else 0
            if source is not None:
                for document in source.call(group, reading):
                    if (count := count + 1) > passed:
                        found = _checked(document, self.asked, source, specials, self.vocab)
                        yield self.where, _DocumentStart(number, (number, count)), found
                continue
            (file,) = group
            assert file.format.read is not None
            for document in file.format.read(file.path, file.packing, reading):
                count += not isinstance(document, Continued)
                if count > passed:
                    begins = _DocumentStart(file.given, (number, count))
                    yield str(file.path), begins, [(document, {})]

    def _groups(self) -> list[tuple[Source, ...]]:
        """Return the groups of files to read together: a path's, for a plugin's source, else each file alone."""
        if self.asked.source is None:
            return [(file,) for file in self.sources if file.format.read is not None]
        return [
            tuple(file for file in self.sources if file.given == given)
            for given in range(max(1, len(self.paths)))
        ]

    def _reading(self, what: str, most: int | None = None) -> Reading:
        total = sum(source.size for source in self.sources if source.format.read)
        total = total if most is None else min(total, most)
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


def _checked(
    document: Any, asked: Sourcing, source: Function, specials: Mapping[str, int] | None, vocab: int
) -> Iterator[tuple[Document, store.Values]]:
    """Yield the non-empty parts of a source's document: text or ids, and their values.

    Raises:
        PluginCodeError: it is not a document, or its values do not match the source's fields.
    """
    whole = isinstance(document, (str, np.ndarray))
    try:
        for part, values in [Segment(document)] if whole else document:
            if isinstance(part, Special):
                part = [] if specials is None else [specials[part.name]]
            if isinstance(part, str):
                part.encode("utf-8")
            else:
                part = np.asarray(part, None if len(part) else np.int64)
                part = part.astype(np.int64, casting="same_kind")
                if part.ndim != 1 or (part.size and not 0 <= part.min() <= part.max() < vocab):
                    raise ValueError(f"ids not in 0 <= id < model.vocab={vocab}")
            for name, given in values.items():
                (field,) = (one for one in asked.fields if one.name == name)
                found = np.asarray(given).astype(field.dtype, casting="same_kind")
                np.broadcast_to(found, () if isinstance(part, str) else part.shape)
                fits = np.isfinite(found).all() and np.allclose(found, given)
                if not fits or (name == WEIGHTS and (found < 0).any()):
                    raise ValueError(f"'{name}' cannot be {plain(repr(given), 40)}")
            if len(part):
                yield part, values
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        what = f"{plain(repr(document), 80)}: {type(error).__name__}: {plain(str(error), 80)}"
        fix = "yield text, ids or a list of Segments, with values of the declared fields"
        raise source.broken(what, fix, did="broke the documents in") from error


def encode_documents(
    documents: Iterable[Document], tokenizer: Tokenizer | None, reading: Reading
) -> Iterator[tuple[Document, np.ndarray]]:
    """Encode documents in order: the next ones are read while the last ones are encoded on all cores.

    Args:
        documents: text, or ids, which are passed through.
        tokenizer: None if all are ids.
        reading: its notes count cuts, and its ``tick`` is called while it encodes.

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

    Each document, or piece of a long text file, or run of short documents gets a random number; those with the
    lowest form the sample, in file order.

    Attributes:
        ids: number of documents that are already ids.
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
        """Add the next document."""
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
            yield from frames(io.BytesIO(data))

    def draw(self) -> None:
        """Sample, or leave out, the documents added since the last call."""
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
