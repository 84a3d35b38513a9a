"""The data of a run: files to tokenised, split, fingerprinted documents, in one call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from minillm_core.config.schema import DataConfig
from minillm_core.data import shuffle
from minillm_core.data.documents import Documents
from minillm_core.data.prepare import Files
from minillm_core.data.reading import Progress
from minillm_core.data.sources import find
from minillm_core.data.split import check_fraction, check_length, split
from minillm_core.data.tokenizer import Tokenizer

__all__ = ["Corpus", "open_corpus", "open_documents"]


@dataclass(frozen=True, eq=False)
class Corpus:
    """What a run trains on and is validated with.

    Attributes:
        train: the training part, in the order of the files.
        val: the held-out part, in seeded order.
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
    if not isinstance(config.val, str):
        check_fraction(config.val)
    where = _listed(config.paths)
    files = Files(find(config.paths, say), where, vocab, cache, say, progress)
    if config.tokenizer is None:
        fraction = None if isinstance(config.val, str) else config.val
        whole, tokenizer, end_of_text = files.documents_and_tokenizer(fraction, config.seed)
    else:
        tokenizer = Tokenizer.load(Path(config.tokenizer).expanduser(), vocab)
        end_of_text = tokenizer.end_of_text
        whole = files.documents(tokenizer, end_of_text)
    if tokenizer and tokenizer.size < vocab:
        say(
            f"the tokenizer has {tokenizer.size:,} entries, model.vocab={vocab}: "
            f"{vocab - tokenizer.size:,} rows of the embedding are not used"
        )
    if isinstance(config.val, str):
        beside = Files(find((config.val,), say), config.val, vocab, cache, say, progress)
        val = beside.documents(tokenizer, end_of_text)
        train = whole.replace(whole.spans, f"train, beside {val.digest}")
        val = val.select(shuffle.order(len(val), config.seed), "held out")
        check_length(train, seq_len, where, "to train on")
        check_length(val, seq_len, config.val, "to validate with")
    else:
        train, val = split(whole, config.val, config.seed, seq_len, where)
    fingerprint = shuffle.fingerprint(train, config.seed)
    return Corpus(train, val, tokenizer, fingerprint, _description(config, files, train, val))


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
    files = Files(find(paths, say), _listed(paths), vocab, cache, say, progress)
    return files.documents(tokenizer, tokenizer.end_of_text if tokenizer else files.end_of_text)


def _description(config: DataConfig, files: Files, train: Documents, val: Documents) -> str:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    origin = files.where if config.paths else f"the standard library of Python {python}"
    count = len(files.sources)
    return (
        f"{_counted(train)} from {origin} ({count:,} file{'s' * (count > 1)}); "
        f"{_counted(val)} held out"
    )


def _listed(paths: Sequence[str]) -> str:
    names = [*paths[:3], f"and {len(paths) - 3} more"] if len(paths) > 3 else paths
    return ", ".join(names) or "the standard library"


def _counted(documents: Documents) -> str:
    count = len(documents)
    return f"{count:,} document{'s' * (count != 1)} ({documents.tokens:,} tokens)"
