"""The data of a run: files to tokenised, split, fingerprinted documents, in one call.

Validation gets whole documents if there are at least 20, chosen by the seed; otherwise the tail of the
token stream, which may begin in the middle of a document. It has at least one window.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from minillm_core.config.schema import DataConfig
from minillm_core.data.blocks import Blocks
from minillm_core.data.documents import Blocked, Documents, column, fingerprint, order
from minillm_core.data.formats import Progress, ticker
from minillm_core.data.sources import check_weighted, resolved
from minillm_core.data.tokenise import TokenCache
from minillm_core.data.tokenizer import Tokenizer, bytes_per_token
from minillm_core.errors import DataError
from minillm_core.plugins.sourcing import PLAIN, WEIGHTS, Sourcing
from minillm_core.text import are, counted, few


@dataclass(frozen=True, eq=False)
class Part:
    """A source of a mixture.

    Attributes:
        name: its path.
        weight: relative to those of the other sources.
        train: its training part.
        val: its held-out part; None if ``data.val`` is a path.
    """

    name: str
    weight: float
    train: Documents
    val: Documents | None


@dataclass(frozen=True, eq=False)
class Corpus:
    """The training and the held-out documents of a run.

    Attributes:
        train: the training part, in file order; in blocks with ``data.block``.
        val: the held-out part, in seeded order.
        tokenizer: None if the data are ids and no tokenizer was named.
        fingerprint: digest of all ids, the split, the order's rule and its seed; the dataloader's
            cursors contain it.
        description: the origin and amount of the data, one sentence.
        parts: the sources of a mixture, whose paths have weights; else empty.
        asked: what plugins require of the documents.
        specials: the ids of the special tokens that they require, by name, and ``end_of_text``.
    """

    train: Blocked
    val: Documents
    tokenizer: Tokenizer | None
    fingerprint: str
    description: str
    parts: tuple[Part, ...] = ()
    asked: Sourcing = PLAIN
    specials: Mapping[str, int] = field(default_factory=dict)

    def check_unchanged(self) -> None:
        """Check before each checkpoint that mapped files have not changed since they were opened.

        Raises:
            DataError: a file was written to, so that steps since then have read other ids.
        """
        self.train.check_unchanged()
        self.val.check_unchanged()


def open_corpus(
    config: DataConfig,
    vocab: int,
    seq_len: int,
    *,
    cache: Path,
    say: Callable[[str], None],
    detail: Callable[[str], None] | None = None,
    progress: Progress | None = None,
    asked: Sourcing = PLAIN,
) -> Corpus:
    """Find, read, check and tokenise the data, or map the tokens that an earlier start has cached.

    Args:
        config: paths, held-out part, tokenizer, seed.
        vocab: rows of the embedding; every id is smaller.
        seq_len: tokens of a row; each part holds at least one window of them.
        cache: a folder for tokens and tokenizers; created if missing.
        say: prints notes for the user, line by line.
        detail: prints notes that need no action; None: ``say``.
        progress: takes the progress of each phase: "checking the files", "reading", "training
            the tokenizer" and "tokenising"; the first call is immediate.
        asked: what plugins require of the documents.

    Raises:
        DataError: any error of the data, their tokenizer or the cache folder.
    """
    if not isinstance(config.val, str) and not 0 <= config.val < 1:
        what = "the held-out fraction must be at least 0 and less than 1"
        fix = "set data.val=0.05, or give a path: data.val=valid.txt"
        raise DataError(what, where=f"data.val={config.val}", fix=fix)
    ticker(progress, "checking the files", 0)
    check_weighted(config.paths)
    common = vocab, cache, say, detail or say, progress, asked
    files, parts = TokenCache(config.files, *common, config.block), ()
    given = resolved(files.sources) if len(config.files) > 1 else {}
    if again := [path for path, count in given.items() if count > 1]:
        what = "its documents count twice, so held-out text may also be trained on"
        say(f"{are(few(again), len(again))} given twice: {what}")
    if config.block:
        _check_blocks(files)
    if config.tokenizer is None:
        whole, tokenizer, end_of_text = files.documents_and_tokenizer()
    else:
        tokenizer = Tokenizer.load(Path(config.tokenizer).expanduser(), vocab, config.end_of_text)
        end_of_text = tokenizer.end_of_text
        tokenizer.reserve(asked.specials, vocab)
        whole = files.documents(tokenizer, end_of_text)
    specials = {"end_of_text": end_of_text, **reserved(tokenizer, asked, vocab)}
    if tokenizer and tokenizer.size < vocab:
        what = f"{vocab - tokenizer.size:,} rows of the embedding are not used"
        say(f"the tokenizer has {tokenizer.size:,} entries, model.vocab={vocab}: {what}")
    if isinstance(config.val, str):
        apart = TokenCache((config.val,), *common)
        content = {*files.digests.values()}
        if both := [str(s.path) for s, of in apart.digests.items() if s.size and of in content]:
            what = "both training and held-out text: the held-out loss says nothing about new text"
            say(f"{are(few(both), len(both))} {what}")
        val = apart.documents(tokenizer, end_of_text)
        train = whole.part(f"train, beside {val.digest}", whole.spans)
        val = val.part("held out", val.spans[order(len(val), config.seed)])
        check_length(train, seq_len, files.where, "to train on")
        check_length(val, seq_len, config.val, "to validate with")
    elif not config.weights:
        train, val = split(whole, config.val, config.seed, seq_len, files.where)
    if config.weights:
        assert files.path_of is not None
        # beside a file the training part's digest, which holds the file's
        held, of = (None, train) if isinstance(config.val, str) else (config.val, whole)
        parts = tuple(_parts(config, of, files.path_of, held, seq_len))
        train = _join_parts("train", [one.train for one in parts], config.weights)
        if held is not None:
            val = _join_parts("held out", [one.val for one in parts if one.val], config.weights)
            val = val.ordered(order(len(val), config.seed))
    library = f"the standard library of Python {sys.version_info.major}.{sys.version_info.minor}"
    if any(one.name == WEIGHTS for one in asked.fields) and (note := _long(train, seq_len)):
        say(note)
    origin = files.where if config.paths or not asked.files else library
    kept, held = _counted(train), _counted(val)
    if not (config.weights or isinstance(config.val, str)) and len(whole) < FEW:
        held = f"{'its' if len(whole) == 1 else 'their'} end ({val.tokens:,} tokens)"
    description = f"{kept} from {origin} ({counted(len(files.sources), 'file')}); {held} held out"
    if config.block and files.first.place:
        train = _in_blocks(files, train, config.tokenizer, tokenizer)
        description = f"a first block, and about {train.tokens:,} tokens in all: {description}"
    known = fingerprint(train, config.seed)
    return Corpus(train, val, tokenizer, known, description, parts, asked, specials)


def _check_blocks(files: TokenCache) -> None:
    """Refuse data that data.block cannot read block by block.

    Raises:
        DataError: they are token shards, or a plugin's documents.
    """
    source, what = files.asked.source, None
    if source is not None:
        what = f"come from plugin '{source.owner}'"
    elif any(one.format.read is None for one in files.sources):
        what = "hold token shards"
    if what:
        what = f"data.block tokenises text files while training reads them, but these data {what}"
        raise DataError(what, where=files.where, fix="leave data.block out")


def _in_blocks(
    files: TokenCache, train: Documents, path: str | None, tokenizer: Tokenizer | None
) -> Blocks:
    """Open the documents from the first block on; estimate the number of tokens from it."""
    ids = np.concatenate([train[i] for i in range(min(len(train), 100))]).astype(np.int64)
    size = float(bytes_per_token(tokenizer, files.vocab)[ids].mean()) if tokenizer else _BYTES
    about = round(sum(one.unpacked for one in files.sources) / max(size, 1.0))
    file = Path(path).expanduser() if path else files.first.tokenizer
    given = (file, tokenizer.end_of_text_token) if file and tokenizer else None
    return Blocks(files, train, given, max(about, train.tokens))


def reserved(tokenizer: Tokenizer | None, asked: Sourcing, vocab: int) -> dict[str, int]:
    """Return the ids of the special tokens that plugins require, and ``end_of_text``, by name.

    Raises:
        DataError: the tokenizer lacks a token, or there is no tokenizer.
    """
    if tokenizer is not None:
        return tokenizer.reserve(asked.specials, vocab)
    for one in asked.specials:
        raise DataError(
            f"plugin '{one.owner}' asks for the special token {one.text}, but there is no tokenizer",
            where="the data, which hold ids",
            fix="name the tokenizer that the ids were made with: data.tokenizer=PATH",
        )
    return {}


def _parts(
    config: DataConfig, whole: Documents, path_of: np.ndarray, held: float | None, seq_len: int
) -> Iterator[Part]:
    """Split the documents of each path with a weight; ``held`` is the held-out fraction, if any."""
    for number, (path, weight) in enumerate(zip(config.files, config.weights, strict=True)):
        mine, val = whole.part(f"source {number}", whole.spans[path_of == number]), None
        if held is None:
            check_length(mine, seq_len, path, "to train on")
        else:
            mine, val = split(mine, held, config.seed, seq_len, path)
        yield Part(path, weight, mine, val)


def _join_parts(name: str, parts: Sequence[Documents], weights: Sequence[float]) -> Documents:
    """Join the parts of a mixture; its digest includes their weights."""
    spans = np.concatenate([one.spans for one in parts])
    total = sum(weights)
    shares = ", ".join(
        f"{one.digest} {weight / total:.9f}" for one, weight in zip(parts, weights, strict=True)
    )
    return parts[0].part(f"{name}: {shares}", spans)


def open_documents(
    paths: Sequence[str],
    *,
    tokenizer: Tokenizer | None,
    vocab: int,
    cache: Path,
    say: Callable[[str], None],
    progress: Progress | None = None,
    asked: Sourcing = PLAIN,
) -> Documents:
    """Open all documents of some files, nothing held out, as for ``minillm eval``.

    Args:
        paths: files or folders; none for the standard library.
        tokenizer: the run's; None if its data are ids.
        vocab: as for :func:`open_corpus`, like the rest.
        cache: as there.
        say: as there.
        progress: as there.
        asked: as there; if its source reads no files, these are read by their formats.

    Raises:
        DataError: as there.
    """
    ticker(progress, "checking the files", 0)
    asked = asked if asked.files else replace(PLAIN, specials=asked.specials)
    files = TokenCache(paths, vocab, cache, say, say, progress, asked)
    return files.documents(tokenizer, tokenizer.start if tokenizer else files.end_of_text)


_BYTES = 6.0
"""Approximate bytes of an id in JSON, with its separator."""


def _long(documents: Documents, seq_len: int) -> str | None:
    """Describe how many documents with weights are longer than a row; None: none is."""
    longer = np.flatnonzero(documents.lengths > seq_len + 1)
    late = 0
    for array, first, _ in documents.spans[longer].tolist():
        weights = column(documents.arrays[array], WEIGHTS)[first : first + seq_len + 1]
        late += not weights.any()
    if not len(longer):
        return None
    return (
        f"{len(longer):,} of {counted(len(documents), 'document')} are longer than a row "
        f"(train.seq_len={seq_len}), and rows cut them; in {late:,} the first row has no loss"
    )


def _counted(documents: Documents) -> str:
    return f"{counted(len(documents), 'document')} ({documents.tokens:,} tokens)"


FEW = 20
"""With fewer documents, the tail of the stream is held out."""


def split(
    documents: Documents, fraction: float, seed: int, seq_len: int, where: str
) -> tuple[Documents, Documents]:
    """Split documents into the training part, in file order, and the held-out part, as drawn.

    Raises:
        DataError: there are not enough tokens for one window of each.
    """
    if len(documents) >= FEW:
        kept, held = _by_document(documents, fraction, seed, seq_len)
    else:
        kept, held = _by_tail(documents, fraction, seq_len)
    train, val = documents.part("train", kept), documents.part("held out", held)
    if min(train.tokens, val.tokens) <= seq_len:
        raise DataError(
            f"train.seq_len={seq_len} is longer than the data: {documents.tokens} tokens, of which "
            f"{seq_len + 1} are needed to train on and as many to hold out",
            where=where,
            fix="give more text, or set a smaller train.seq_len",
        )
    return train, val


def check_length(documents: Documents, seq_len: int, where: str, purpose: str) -> None:
    """Refuse documents that are too short for one window and the label of its last token.

    Raises:
        DataError: they hold fewer than seq_len + 1 tokens.
    """
    if documents.tokens <= seq_len:
        raise DataError(
            f"train.seq_len={seq_len} is longer than the data: it takes {seq_len + 1} tokens "
            f"{purpose}, and there are {documents.tokens}",
            where=where,
            fix="give more text, or set a smaller train.seq_len",
        )


def _by_document(
    documents: Documents, fraction: float, seed: int, seq_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draw whole documents to hold out; return the spans of the two parts."""
    shuffled = order(len(documents), seed)
    count = min(max(round(fraction * len(documents)), 1), len(documents) - 1)
    ends = np.cumsum(documents.lengths[shuffled])
    enough = int(np.searchsorted(ends, seq_len + 1)) + 1  # documents up to the first whole window
    chosen = shuffled[: max(count, enough)]
    return np.delete(documents.spans, chosen, axis=0), documents.spans[chosen]


def _by_tail(documents: Documents, fraction: float, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Split the stream in two; return the spans of the two parts."""
    cut = max(documents.tokens - max(round(fraction * documents.tokens), seq_len + 1), 0)
    before, after = documents.spans.copy(), documents.spans.copy()
    position = documents.spans[:, 1] + np.clip(cut - documents.offsets[:-1], 0, documents.lengths)
    before[:, 2], after[:, 1] = position, position
    return before[before[:, 2] > before[:, 1]], after[after[:, 2] > after[:, 1]]
