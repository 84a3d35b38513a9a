"""Tokenization of text into shards, which ``minillm train --data DIR`` maps without reading text."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from minillm_core import ConfigError, DataError
from minillm_core.commands import nearest
from minillm_core.documents import (
    Continued,
    Document,
    Progress,
    Tokenizer,
    encode_documents,
    fitting_entries,
    replace_file,
    stated_end_of_text,
    write_shard,
)
from minillm_data.files import ANY, Malformed
from minillm_data.formats import MAGIC
from minillm_data.output import Output, check_outside, key_of
from minillm_data.texts import Texts
from minillm_data.train_tokenizer import ENTRIES, draw_sample, train_on

SHARD_TOKENS = 1 << 24
"""Approximate tokens per shard: 32 MiB at two bytes each. A document is never split over shards."""

_TOKENIZER = "tokenizer.json"


def tokenize(
    paths: Sequence[str | Path],
    to: str | Path,
    *,
    tokenizer: str | Path | None = None,
    vocab: int | None = None,
    format: str = "shards",
    seq_len: int | None = None,
    malformed: Malformed = "strict",
    say: Callable[[str], None] = lambda line: None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Encode the documents of files into token shards; after a kill the same call resumes.

    Args:
        paths: files or folders of text or JSON lines.
        to: the folder to write: shards, tokenizer.json, report.json.
        tokenizer: a tokenizer.json; default: one is trained on the text, see
            :func:`~minillm_data.train_tokenizer.train_tokenizer`.
        vocab: vocabulary size of the tokenizer to train; with a given tokenizer, or for documents of
            ids, the exclusive upper bound of ids (default: its size; 65,536).
        format: "shards" of llm.c; "bin" or "bin2d", version 2 of the sets of the first MiniLLM
            trainer: one sample per document, of any length, or padded or truncated to ``seq_len`` + 1.
        seq_len: sequence length of bin2d, required there.
        malformed: "strict" or "skip".
        say: prints a line.
        progress: called with the name of the work, the bytes read and the total.

    Returns:
        The report: documents, tokens, files, the bound of ids, the tokenizer's sha256, and notes:
        counts of skipped documents in all files, and of truncations since the last start.

    Raises:
        DataError: the files, the tokenizer or the folder cannot be used.
        ConfigError: an unknown format, or an unexpected or missing ``seq_len``.
    """
    _check_format(format, seq_len)
    check_outside(Path(to), paths)
    texts = Texts(paths, malformed, say)
    given = (
        None if tokenizer is None else Tokenizer.load(Path(tokenizer).expanduser(), vocab or ANY)
    )
    digest = given.digest if given else None
    rule = {"tokenizer": digest, "vocab": vocab, "malformed": malformed}
    key = key_of("tokenize", texts.sources, **rule, format=format, seq_len=seq_len)
    with Output(Path(to), key) as output:
        if output.note:
            say(output.note)
        chosen = given or _trained(output, texts, vocab, progress)
        below = vocab or (chosen.size if chosen else 1 << 16)
        reading = texts.reading("tokenising", progress, below)
        if chosen:
            say(f"tokenising with {chosen.encoder}")
            chosen.save(output.folder / _TOKENIZER)
        end_of_text = chosen.end_of_text if chosen else stated_end_of_text(texts.sources)
        part = FORMATS[format](output, below, chosen, end_of_text, seq_len)
        documents = _after(output.state.rows, texts.read(reading))
        for document, ids in encode_documents(documents, chosen, reading):
            part.add(ids, begins=not isinstance(document, Continued))
        part.close()
        counts = output.state.counts
        if not counts["documents"]:
            raise DataError("the data are empty", where=str(paths[0]), fix="give files with text")
        report = {
            "command": "tokenize",
            "paths": [str(path) for path in paths],
            "documents": counts["documents"],
            "tokens": counts["tokens"],
            "format": format,
            "files": [name for name in output.state.parts if name != _TOKENIZER],
            "vocab": below,
            "tokenizer": chosen.digest if chosen else None,
            "notes": {**reading.notes, **part.notes},
        }
        output.finish(report)
    return report


def _trained(
    output: Output, texts: Texts, vocab: int | None, progress: Progress | None
) -> Tokenizer | None:
    """Train a tokenizer, or load the one trained by an earlier start; None: all documents are ids."""
    place = output.folder / _TOKENIZER
    if "trained" in output.state.more:
        return Tokenizer.load(place, ANY) if output.state.more["trained"] else None
    sample = draw_sample(texts, texts.reading("reading", progress, vocab or 1 << 16))
    if sample.ids and sample.total:
        raise DataError(
            "the data contain both text and token ids; a newly trained tokenizer would not match the ids",
            where=", ".join(map(str, texts.paths)),
            fix="name the tokenizer that the ids were made with: --tokenizer FILE",
        )
    output.state.more["trained"] = sample.total > 0
    if not sample.total:
        output.commit()
        return None
    trained = train_on(sample, vocab or fitting_entries(texts.sources, ENTRIES), progress)
    trained.save(place)
    output.commit(_TOKENIZER)
    return trained


class Part(ABC):
    """The current part: buffers ids in memory until its files are written.

    Args:
        output: the folder.
        vocab: exclusive upper bound of ids.
        tokenizer: the tokenizer; None: the documents are ids.
        end_of_text: the id that begins each document.
        seq_len: sequence length of bin2d.
    """

    def __init__(
        self,
        output: Output,
        vocab: int,
        tokenizer: Tokenizer | None,
        end_of_text: int,
        seq_len: int | None,
    ) -> None:
        self.output, self.vocab, self.seq_len = output, vocab, seq_len or 0
        self.tokenizer, self.end_of_text = tokenizer, end_of_text
        self.dtype = np.dtype("<u2" if vocab <= 1 << 16 else "<u4")
        self._ids: list[np.ndarray] = []
        self._tokens = 0
        self._starts: list[int] = []

    @property
    def notes(self) -> dict[str, int]:
        """Counts of omissions during writing, by description."""
        return {}

    def add(self, ids: np.ndarray, begins: bool) -> None:
        """Add a document, (tokens,), or further ids of the last one; first write the part if it is full.

        An end-of-text id is prepended to a document that lacks it.
        """
        if begins:
            if self._tokens >= SHARD_TOKENS:
                self.close()
            self._starts.append(self._tokens)
            if len(ids) == 0 or ids[0] != self.end_of_text:
                self._ids.append(np.array([self.end_of_text], self.dtype))
                self._tokens += 1
        self._ids.append(ids.astype(self.dtype))
        self._tokens += len(ids)

    def close(self) -> None:
        """Write the part's files, unless it is empty.

        Raises:
            DataError: they cannot be written.
        """
        if not self._starts:
            return
        state = self.output.state
        state.rows += len(self._starts)
        state.counts.update(documents=len(self._starts), tokens=self._tokens)
        number = state.more.get("part", 0)
        state.more["part"] = number + 1
        spans = np.array([*self._starts, self._tokens], np.int64)
        with self.output.writing():
            names = self.write(f"part-{number:05d}", np.concatenate(self._ids), spans)
        self._ids, self._tokens, self._starts = [], 0, []
        self.output.commit(*names)

    @abstractmethod
    def write(self, prefix: str, ids: np.ndarray, spans: np.ndarray) -> list[str]:
        """Write the files of a part.

        Args:
            prefix: prefix of the file names.
            ids: (tokens,), of ``dtype``.
            spans: int64 (documents + 1,), the start of each document, and the end.

        Returns:
            The file names.
        """


class Shard(Part):
    """A token shard of llm.c and modded-nanogpt."""

    def write(self, prefix: str, ids: np.ndarray, spans: np.ndarray) -> list[str]:
        write_shard(self.output.folder / f"{prefix}.bin", ids, self.vocab)
        return [f"{prefix}.bin"]


class Bin(Part):
    """A set of ids with an index: one sample per document, of any length."""

    name = "bin"

    def write(self, prefix: str, ids: np.ndarray, spans: np.ndarray) -> list[str]:
        names = [f"{prefix}.ids.bin", f"{prefix}.ids.idx", f"{prefix}.meta.json"]
        index = np.stack([spans[:-1], np.diff(spans)], axis=1).astype("<u8")
        replace_file(self.output.folder / names[1], index.tobytes())
        self._write_ids(names, ids, len(index), {})
        return names

    def _write_ids(
        self, names: list[str], ids: np.ndarray, samples: int, more: dict[str, Any]
    ) -> None:
        content = np.ascontiguousarray(ids).data.cast("B")
        replace_file(self.output.folder / names[0], [content])
        meta = {
            "magic": MAGIC,
            "version": 2,
            "format": self.name,
            "task": "pretrain",
            "num_samples": samples,
            "byteorder": "little",
            "seq_len": self.seq_len or None,
            "ids": {
                "bin": names[0],
                "idx": names[1] if len(names) > 2 else None,
                "dtype": "uint16" if self.dtype.itemsize == 2 else "uint32",
                "smallest": int(ids.min()),
                "largest": int(ids.max()),
            },
            "labels": None,
            "tokenizer_sha256": self.tokenizer.digest if self.tokenizer else None,
            "pad_id": self.end_of_text,
            "end_of_text_id": self.end_of_text,
            "digest": xxhash.xxh3_128(content).hexdigest(),
            **more,
        }
        replace_file(self.output.folder / names[-1], json.dumps(meta, indent=1).encode())


class Bin2d(Bin):
    """A set of samples of exactly seq_len + 1 ids: padded or truncated."""

    name = "bin2d"

    @property
    def notes(self) -> dict[str, int]:
        cut = self.output.state.more.get("cut", 0)
        return {f"cut: tokens of documents longer than {self.seq_len + 1:,}": cut} if cut else {}

    def write(self, prefix: str, ids: np.ndarray, spans: np.ndarray) -> list[str]:
        stride, lengths = self.seq_len + 1, np.diff(spans)
        rows = np.full((len(lengths), stride), self.end_of_text, self.dtype)
        for row, first, length in zip(rows, spans, lengths, strict=False):
            row[: min(length, stride)] = ids[first : first + min(length, stride)]
        more = self.output.state.more
        more["cut"] = more.get("cut", 0) + int(np.maximum(lengths - stride, 0).sum())
        names = [f"{prefix}.ids2d.bin", f"{prefix}.meta.json"]
        self._write_ids(names, rows, len(rows), {"stride": stride})
        return names


FORMATS: dict[str, type[Part]] = {"shards": Shard, "bin": Bin, "bin2d": Bin2d}
"""Output formats of :func:`tokenize`, by name."""


def _check_format(format: str, seq_len: int | None) -> None:
    if format not in FORMATS:
        close = nearest(format, FORMATS)
        raise ConfigError(
            f"there is no format {format!r}",
            where="--format",
            fix=f"did you mean {close}?" if close else f"one of {', '.join(FORMATS)}",
        )
    if (seq_len is not None) != (format == "bin2d"):
        raise ConfigError(
            "bin2d needs the length of its samples"
            if seq_len is None
            else f"{format} has no --seq-len: its samples are as long as the documents",
            where="--seq-len",
            fix="give --seq-len N" if seq_len is None else "leave it out, or set --format bin2d",
        )
    if seq_len is not None and seq_len < 1:
        raise ConfigError(f"samples of {seq_len} tokens", where="--seq-len", fix="1 or more")


def _after(count: int, documents: Iterator[Document]) -> Iterator[Document]:
    """Skip the first documents, with all their pieces."""
    for document in documents:
        count -= not isinstance(document, Continued)
        if count < 0:
            yield document
