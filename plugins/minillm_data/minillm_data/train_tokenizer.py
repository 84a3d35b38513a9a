"""Training of a byte-level BPE tokenizer, as in a run without ``data.tokenizer``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from minillm_core import DataError
from minillm_core.documents import Progress, Reading, Sample, Tokenizer, fitting_entries, ticker
from minillm_data.files import Malformed
from minillm_data.texts import Texts

ENTRIES = 32_768
"""Default maximum vocabulary size of a tokenizer."""


def train_tokenizer(
    paths: Sequence[str | Path],
    to: str | Path | None = None,
    *,
    vocab: int | None = None,
    malformed: Malformed = "strict",
    say: Callable[[str], None] = lambda line: None,
    progress: Progress | None = None,
) -> tuple[Tokenizer, dict[str, Any]]:
    """Train a byte-level BPE tokenizer on a seeded sample of at most 64 MiB of the files' text.

    The same files give the same tokenizer. ``<|endoftext|>`` is entry 0.

    Args:
        paths: files or folders.
        to: the tokenizer.json to write, atomically; None: not written.
        vocab: vocabulary size; default: 32,768, or for little text one entry per 800 bytes.
        malformed: "strict" or "skip".
        say: prints a line.
        progress: called with the name of the work, the bytes done and the total.

    Returns:
        The tokenizer, and the report: entries, bytes of text, bytes of the sample, notes.

    Raises:
        DataError: the output file exists or cannot be written, there is no text, or a data file
            cannot be read.
    """
    target = None if to is None else Path(to)
    if target is not None and target.exists():
        raise DataError(
            "there is a file already", where=str(target), fix="name another one with --to"
        )
    texts = Texts(paths, malformed, say)
    reading = texts.reading("reading", progress)
    sample = draw_sample(texts, reading)
    if sample.ids:
        reading.notes["left out: documents that are ids"] += sample.ids
    if not sample.total:
        raise DataError("there is no text", where=str(paths[0]), fix="give files with text in them")
    tokenizer = train_on(sample, vocab or fitting_entries(texts.sources, ENTRIES), progress)
    if target is not None:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            tokenizer.save(target)
        except OSError as error:
            raise DataError(
                f"the tokenizer cannot be written: {error.strerror or error}",
                where=str(target),
                fix="make room there, or name another file with --to",
            ) from error
    report = {
        "command": "train-tokenizer",
        "paths": [str(path) for path in paths],
        "entries": tokenizer.size,
        "text_bytes": sample.total,
        "sample_bytes": sample.drawn,
        "sha256": tokenizer.digest,
        "notes": dict(reading.notes),
    }
    return tokenizer, report


def draw_sample(texts: Texts, reading: Reading) -> Sample:
    """Read every document and draw the sample of text to train a tokenizer on."""
    sample = Sample()
    for document in texts.read(reading):
        sample.add(document)
    sample.draw()
    return sample


def train_on(sample: Sample, entries: int, progress: Progress | None) -> Tokenizer:
    """Train a tokenizer on a sample."""
    beat = ticker(progress, "training the tokenizer", 0)
    return Tokenizer.train(sample.texts(), entries, lambda: beat(0))
