"""From source files to token ids: streamed, so that no corpus has to fit into memory.

The files are read once to look at every document, once to train a tokenizer where none is given,
and once to encode. The next batch is read while the last one is encoded on all cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from minillm_core.data.formats import Document
from minillm_core.data.reading import Progress, Reading
from minillm_core.data.shards import check_ids, starts
from minillm_core.data.sources import Source
from minillm_core.data.split import FEW, held_out
from minillm_core.data.store import Writer
from minillm_core.data.tokenizer import Tokenizer, grouped
from minillm_core.errors import DataError

__all__ = ["Survey", "encode", "reading", "survey", "training_texts"]

_BATCH = 1 << 22  # characters and ids encoded together


@dataclass(frozen=True)
class Survey:
    """What the files hold, shards apart."""

    texts: int
    characters: int
    ids: int  # documents that are ids already


def reading(sources: Sequence[Source], vocab: int, what: str, progress: Progress | None) -> Reading:
    """A reading of some files that reports how far it has come."""
    if progress is None:
        return Reading(vocab)
    total, done = sum(source.size for source in sources if source.format.read), 0

    def tick(count: int) -> None:
        nonlocal done
        done += count
        progress(what, done, total)

    return Reading(vocab, tick)


def survey(sources: Sequence[Source], reading: Reading) -> Survey:
    """Read and check every document.

    Raises:
        DataError: something cannot be read.
    """
    texts = characters = ids = 0
    for document in _documents(sources, reading):
        if isinstance(document, str):
            texts, characters = texts + 1, characters + len(document)
        else:
            ids += 1
    return Survey(texts, characters, ids)


def training_texts(
    sources: Sequence[Source], reading: Reading, found: Survey, fraction: float | None, seed: int
) -> Iterator[str]:
    """The texts that are not held out, all of them where ``fraction`` is None.

    Where the tail of the stream is held out, it is measured in characters here: there are no
    tokens yet.
    """
    texts = (text for text in _documents(sources, reading) if isinstance(text, str))
    if fraction is None:
        yield from texts
    elif found.texts >= FEW:
        held = set(held_out(found.texts, fraction, seed).tolist())
        yield from (text for index, text in enumerate(texts) if index not in held)
    else:
        left = found.characters - round(fraction * found.characters)
        for text in texts:
            yield text[:left]
            left -= min(left, len(text))


def encode(
    sources: Sequence[Source],
    shards: Sequence[np.ndarray],
    tokenizer: Tokenizer | None,
    end_of_text: int,
    reading: Reading,
    writer: Writer,
) -> None:
    """Write the ids of every document, texts and ids first, then the shards' documents.

    Args:
        sources: all files.
        shards: those of them that are shards, mapped.
        tokenizer: None where no text is expected.
        end_of_text: the id that every document begins with.
        reading: for the files that are read.
        writer: takes the ids.

    Raises:
        DataError: something cannot be read, an id is too large, or there is text and no tokenizer.
    """
    with ThreadPoolExecutor(1) as pool:
        pending = None
        documents = _documents(sources, reading, text=tokenizer is not None)
        for batch in grouped(documents, len, _BATCH):
            encoded = pool.submit(_encode, batch, tokenizer)
            if pending:
                _write(writer, end_of_text, pending.result())
            pending = encoded
        if pending:
            _write(writer, end_of_text, pending.result())
    mapped = (source for source in sources if source.format.read is None)
    for source, ids in zip(mapped, shards, strict=True):
        check_ids(ids, reading.vocab, source.path)
        writer.shard(starts(ids, end_of_text), len(ids))


def _documents(
    sources: Sequence[Source], reading: Reading, text: bool = True
) -> Iterator[Document]:
    for source in sources:
        if source.format.read is None:
            continue
        for document in source.format.read(source.path, source.packing, reading):
            if isinstance(document, str) and not text:
                raise DataError(
                    "the data hold text, and there is no tokenizer: the model is one of ids alone",
                    where=str(source.path),
                    fix="give ids; or train with data.tokenizer=PATH, the one the ids were made with",
                )
            yield document


def _encode(batch: list[Document], tokenizer: Tokenizer | None) -> list[np.ndarray]:
    texts = [document for document in batch if isinstance(document, str)]
    encoded = iter(tokenizer.encode(texts) if tokenizer else [])
    return [next(encoded) if isinstance(d, str) else d for d in batch]


def _write(writer: Writer, end_of_text: int, documents: list[np.ndarray]) -> None:
    for ids in documents:
        writer.document(end_of_text, ids)
