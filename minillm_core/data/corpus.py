"""The data of a run: files to tokenised, split, fingerprinted documents, in one call."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from minillm_core.config.schema import DataConfig
from minillm_core.data import shuffle, tokenise
from minillm_core.data.digest import digest
from minillm_core.data.documents import Documents
from minillm_core.data.reading import Progress
from minillm_core.data.shards import map_shard
from minillm_core.data.sources import Source, find
from minillm_core.data.split import check_fraction, check_length, split
from minillm_core.data.store import Writer, open_entry, sweep
from minillm_core.data.tokenizer import Tokenizer
from minillm_core.errors import DataError

__all__ = ["Corpus", "open_corpus", "open_documents"]

_VERSION = 1
"""Of everything that turns files into ids; another one makes the cache anew."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """What a run trains on and is validated with.

    Attributes:
        train: the training part, in the order of the files.
        val: the held-out part, in the order of the files.
        tokenizer: None where the data are ids and no tokenizer was named.
        fingerprint: of all ids, the split, the order's rule and its seed; the one that the
            loader's cursors carry.
        description: where the data came from and how much there is, one sentence.
    """

    train: Documents
    val: Documents
    tokenizer: Tokenizer | None
    fingerprint: str
    description: str


@dataclass(frozen=True)
class _Kitchen:
    """Where the work is done and who is told about it."""

    vocab: int
    cache: Path
    say: Callable[[str], None]
    progress: Progress | None


def open_corpus(
    config: DataConfig,
    vocab: int,
    seq_len: int,
    *,
    cache: Path,
    say: Callable[[str], None],
    progress: Progress | None = None,
) -> Corpus:
    """Find, read, check and tokenise the data, or map what an earlier start has left in the cache.

    Args:
        config: paths, held-out part, tokenizer, seed.
        vocab: rows of the embedding; every id is smaller.
        seq_len: tokens of a row; each part holds at least one window of them.
        cache: a folder to keep tokens and tokenizers in; made if it is missing.
        say: told, a line at a time, what a person should know.
        progress: told how far the reading has come.

    Raises:
        DataError: anything about the data, their tokenizer or the cache folder.
    """
    kitchen = _Kitchen(vocab, cache, say, progress)
    if not isinstance(config.val, str):
        check_fraction(config.val)
    sources = find(config.paths, say)
    where = ", ".join(config.paths) or "the standard library"
    if config.tokenizer is None:
        whole, tokenizer, end_of_text = _with_own_tokenizer(sources, config, kitchen, where)
    else:
        tokenizer = Tokenizer.load(Path(config.tokenizer).expanduser(), vocab)
        end_of_text = tokenizer.end_of_text
        whole = _entry(sources, tokenizer, end_of_text, kitchen, where)
    if tokenizer and tokenizer.size < vocab:
        say(
            f"the tokenizer has {tokenizer.size:,} entries, model.vocab={vocab}: "
            f"{vocab - tokenizer.size:,} rows of the embedding are not used"
        )
    if isinstance(config.val, str):
        val = _entry(find((config.val,), say), tokenizer, end_of_text, kitchen, config.val)
        train = whole.replace(whole.spans, f"train, beside {val.digest}")
        check_length(train, seq_len, where, "to train on")
        check_length(val, seq_len, config.val, "to validate with")
    else:
        train, val = split(whole, config.val, config.seed, seq_len, where)
    origin = where if config.paths else f"the standard library of Python {_python()}"
    description = (
        f"{_counted(train)} from {origin} ({len(sources):,} file{'s' * (len(sources) > 1)}); "
        f"{_counted(val)} held out"
    )
    return Corpus(train, val, tokenizer, shuffle.fingerprint(train, config.seed), description)


def open_documents(
    paths: Sequence[str],
    *,
    tokenizer: Tokenizer | None,
    vocab: int,
    cache: Path,
    say: Callable[[str], None],
    progress: Progress | None = None,
) -> Documents:
    """All documents of some files, nothing held out, as ``minillm eval`` wants them.

    Args:
        paths: files or folders; none for the standard library.
        tokenizer: the run's; None where its data were ids.
        vocab: as for :func:`open_corpus`, like the rest.
        cache: as there.
        say: as there.
        progress: as there.

    Raises:
        DataError: as there.
    """
    kitchen = _Kitchen(vocab, cache, say, progress)
    sources = find(paths, say)
    end_of_text = tokenizer.end_of_text if tokenizer else _end_of_text(sources)
    where = ", ".join(paths) or "the standard library"
    return _entry(sources, tokenizer, end_of_text, kitchen, where)


def _with_own_tokenizer(
    sources: list[Source], config: DataConfig, kitchen: _Kitchen, where: str
) -> tuple[Documents, Tokenizer | None, int]:
    """Train a tokenizer if there is text, and keep it beside the ids it made."""
    fraction = None if isinstance(config.val, str) else config.val
    key = _key(sources, ["trained", fraction, config.seed, kitchen.vocab, tokenizers.__version__])
    entry = kitchen.cache / "tokens" / key
    file = entry / "tokenizer.json"
    opened = _open(sources, entry, kitchen)
    if opened is None:
        tokenizer = _train(sources, fraction, config.seed, kitchen)
        end_of_text = tokenizer.end_of_text if tokenizer else _end_of_text(sources)
        opened = _make(sources, tokenizer, end_of_text, entry, kitchen, where)
    documents, meta = opened
    if meta["tokenizer"] is None:
        return documents, None, meta["end_of_text"]
    tokenizer = Tokenizer.load(file, kitchen.vocab)
    kitchen.say(f"a byte-level BPE of {tokenizer.size:,} entries, trained here, is in {file}")
    return documents, tokenizer, tokenizer.end_of_text


def _train(
    sources: list[Source], fraction: float | None, seed: int, kitchen: _Kitchen
) -> Tokenizer | None:
    shards = any(source.format.read is None for source in sources)
    what = "reading"
    read = tokenise.reading(sources, kitchen.vocab, what, kitchen.progress)
    found = tokenise.survey(sources, read)
    if not found.texts:
        return None
    if found.ids or shards:
        raise DataError(
            "the data hold text and ids, and a tokenizer trained here would not be theirs",
            fix="name the tokenizer that the ids were made with: data.tokenizer=tokenizer.json",
        )
    read = tokenise.reading(sources, kitchen.vocab, "training a tokenizer", kitchen.progress)
    texts = tokenise.training_texts(sources, read, found, fraction, seed)
    return Tokenizer.train(texts, kitchen.vocab)


def _entry(
    sources: list[Source],
    tokenizer: Tokenizer | None,
    end_of_text: int,
    kitchen: _Kitchen,
    where: str,
) -> Documents:
    """The documents of some files under a given tokenizer."""
    key = _key(sources, [tokenizer.digest if tokenizer else None, end_of_text, kitchen.vocab])
    entry = kitchen.cache / "tokens" / key
    opened = _open(sources, entry, kitchen)
    if opened is None:
        opened = _make(sources, tokenizer, end_of_text, entry, kitchen, where)
    return opened[0]


def _make(
    sources: list[Source],
    tokenizer: Tokenizer | None,
    end_of_text: int,
    entry: Path,
    kitchen: _Kitchen,
    where: str,
) -> tuple[Documents, dict[str, Any]]:
    shards = [map_shard(source.path) for source in sources if source.format.read is None]
    read = tokenise.reading(sources, kitchen.vocab, "tokenising", kitchen.progress)
    try:
        sweep(entry.parent)
        with Writer(entry, kitchen.vocab) as writer:
            tokenise.encode(sources, shards, tokenizer, end_of_text, read, writer)
            for source in sources:
                source.check_unchanged()
            if not writer.documents:
                raise DataError(
                    "the data are empty", where=where, fix="give files with text in them"
                )
            meta = {
                "end_of_text": end_of_text,
                "notes": dict(read.notes),
                "tokenizer": tokenizer.digest if tokenizer else None,
            }
            writer.commit(meta, tokenizer)
    except OSError as error:
        raise DataError(
            f"the cache cannot be written: {error.strerror or error}",
            where=str(kitchen.cache),
            fix="make room there, or make it writable",
        ) from error
    opened = _open(sources, entry, kitchen)
    if opened is None:
        raise DataError(
            "the cache did not keep what was written to it",
            where=str(entry),
            fix="look after the disk it is on",
        )
    return opened


def _open(
    sources: list[Source], entry: Path, kitchen: _Kitchen
) -> tuple[Documents, dict[str, Any]] | None:
    mapped = [source for source in sources if source.format.read is None]
    content = digest(" ".join(source.digest for source in mapped))
    shards = [map_shard(source.path) for source in mapped] if entry.is_dir() else []
    opened = open_entry(entry, shards, kitchen.vocab, content, kitchen.say)
    if opened:
        for note, count in sorted(opened[1]["notes"].items()):
            kitchen.say(f"left out: {count:,} {note}")
        if opened[1]["tokenizer"] is None:
            kitchen.say(f"no tokenizer: documents begin with id {opened[1]['end_of_text']}")
    return opened


def _key(sources: list[Source], further: list[Any]) -> str:
    content = [_VERSION, [source.digest for source in sources], *further]
    return digest(json.dumps(content))


def _end_of_text(sources: list[Source]) -> int:
    """Without a tokenizer: what the first shard begins with, else 0, as in tokenizers made here."""
    for source in sources:
        if source.format.read is None:
            return int(map_shard(source.path)[0])
    return 0


def _counted(documents: Documents) -> str:
    count = len(documents)
    return f"{count:,} document{'s' * (count != 1)} ({documents.tokens:,} tokens)"


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
