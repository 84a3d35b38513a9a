"""Text to token shards: what ``minillm train --data DIR`` then maps without reading any text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minillm_core import DataError
from minillm_core.documents import (
    Continued,
    Document,
    Progress,
    Tokenizer,
    encode_documents,
    write_shard,
)
from minillm_data.output import Output, key_of
from minillm_data.rows import Malformed
from minillm_data.texts import ANY, Texts
from minillm_data.train_tokenizer import draw_sample, entries_for, train_on

SHARD_TOKENS = 1 << 24
"""Tokens of a shard, about: 32 MiB of them in two bytes each. A document is in one shard."""

_TOKENIZER = "tokenizer.json"


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
        tokenizer: a tokenizer.json; default: one is trained on the text, see
            :func:`~minillm_data.train_tokenizer.train_tokenizer`.
        vocab: entries of the tokenizer that is trained; for a given one, or for documents that are
            ids, the bound that every id is below (default: its size; 65,536).
        malformed: "strict" or "skip".
        say: prints a line for people.
        progress: called with the work's name, the bytes read and those in all.

    Returns:
        The report: documents, tokens, shards, the bound of ids, the tokenizer's sha256, and notes:
        what was left out of all files, and what was cut since the last start.

    Raises:
        DataError: something about the files, the tokenizer or the folder.
    """
    texts = Texts(paths, malformed, say)
    given = (
        None if tokenizer is None else Tokenizer.load(Path(tokenizer).expanduser(), vocab or ANY)
    )
    digest = given.digest if given else None
    key = key_of("tokenize", texts.sources, tokenizer=digest, vocab=vocab, malformed=malformed)
    with Output(Path(to), key) as output:
        if output.note:
            say(output.note)
        chosen = given or _trained(output, texts, vocab, progress)
        below = vocab or (chosen.size if chosen else 1 << 16)
        reading = texts.reading("tokenising", progress, below)
        if chosen:
            say(f"tokenising with {chosen.encoder}")
            chosen.save(output.folder / _TOKENIZER)
        shard = Shard(output, below, chosen.end_of_text if chosen else 0)
        documents = _after(output.state.rows, texts.read(reading))
        for document, ids in encode_documents(documents, chosen, reading):
            shard.add(ids, begins=not isinstance(document, Continued))
        shard.close()
        counts = output.state.counts
        if not counts["documents"]:
            raise DataError("the data are empty", where=str(paths[0]), fix="give files with text")
        report = {
            "command": "tokenize",
            "paths": [str(path) for path in paths],
            "documents": counts["documents"],
            "tokens": counts["tokens"],
            "shards": [name for name in output.state.parts if name != _TOKENIZER],
            "vocab": below,
            "tokenizer": chosen.digest if chosen else None,
            "notes": dict(reading.notes),
        }
        output.finish(report)
    return report


def _trained(
    output: Output, texts: Texts, vocab: int | None, progress: Progress | None
) -> Tokenizer | None:
    """Train a tokenizer, or load the one that an earlier start trained; None: all documents are ids."""
    place = output.folder / _TOKENIZER
    if "trained" in output.state.more:
        return Tokenizer.load(place, ANY) if output.state.more["trained"] else None
    sample = draw_sample(texts, texts.reading("reading", progress, vocab or 1 << 16))
    if sample.ids and sample.total:
        raise DataError(
            "the data hold text and ids, and a tokenizer trained here would not be theirs",
            where=", ".join(map(str, texts.paths)),
            fix="name the tokenizer that the ids were made with: --tokenizer FILE",
        )
    output.state.more["trained"] = sample.total > 0
    if not sample.total:
        output.commit()
        return None
    trained = train_on(sample, entries_for(texts.paths, vocab), progress)
    trained.save(place)
    output.commit(_TOKENIZER)
    return trained


class Shard:
    """The shard that is being filled: its ids are in memory until it is written.

    Args:
        output: the folder.
        vocab: every id is below it.
        end_of_text: the id that each document begins with.
    """

    def __init__(self, output: Output, vocab: int, end_of_text: int) -> None:
        self._output, self._vocab = output, vocab
        self._dtype = np.dtype(np.uint16 if vocab <= 1 << 16 else np.uint32)
        self._end_of_text = np.array([end_of_text], self._dtype)
        self._ids: list[np.ndarray] = []
        self._tokens = self._documents = 0

    def add(self, ids: np.ndarray, begins: bool) -> None:
        """Add a document, (tokens,), or further ids of the last one; a full shard is written before.

        A document gets its end-of-text id unless it begins with one.
        """
        if begins:
            if self._tokens >= SHARD_TOKENS:
                self.close()
            if len(ids) == 0 or ids[0] != self._end_of_text[0]:
                self._ids.append(self._end_of_text)
                self._tokens += 1
            self._documents += 1
        self._ids.append(ids.astype(self._dtype))
        self._tokens += len(ids)

    def close(self) -> None:
        """Write the shard, if there is anything in it.

        Raises:
            DataError: it cannot be written.
        """
        if not self._documents:
            return
        state = self._output.state
        name = f"part-{sum(part.endswith('.bin') for part in state.parts):05d}.bin"
        try:
            write_shard(self._output.folder / name, np.concatenate(self._ids), self._vocab)
        except OSError as error:
            raise self._output.unwritable(error) from error
        state.rows += self._documents
        state.counts.update(documents=self._documents, tokens=self._tokens)
        self._ids, self._tokens, self._documents = [], 0, 0
        self._output.commit(name)


def _after(count: int, documents: Iterator[Document]) -> Iterator[Document]:
    """Pass over the first documents, with all their pieces."""
    for document in documents:
        count -= not isinstance(document, Continued)
        if count < 0:
            yield document
