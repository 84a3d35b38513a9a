"""Some files made into documents, or found made: the cache decides which."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers

from minillm_core.data import tokenise
from minillm_core.data.digest import digest
from minillm_core.data.documents import Documents
from minillm_core.data.reading import Progress, Reading
from minillm_core.data.shards import map_shard
from minillm_core.data.sources import Source
from minillm_core.data.store import Entry, Writer, open_entry, sweep
from minillm_core.data.tokenizer import Tokenizer
from minillm_core.errors import DataError

__all__ = ["Files"]

_VERSION = 1
"""Of everything that turns files into ids; another one makes the cache anew."""


@dataclass(frozen=True)
class Files:
    """Some files that are to become documents.

    Attributes:
        sources: the files.
        where: what to call them in messages.
        vocab: ids are smaller.
        cache: the folder that keeps tokens and tokenizers.
        say: told what a person should know.
        progress: told how far the reading has come.
    """

    sources: Sequence[Source]
    where: str
    vocab: int
    cache: Path
    say: Callable[[str], None]
    progress: Progress | None

    def documents(self, tokenizer: Tokenizer | None, end_of_text: int) -> Documents:
        """The documents under a given tokenizer; without one, all must be ids.

        Raises:
            DataError: something about the files or the cache.
        """
        entry = self._entry([tokenizer.digest if tokenizer else None, end_of_text])
        opened = self._open(entry) or self._make(entry, tokenizer, end_of_text)
        return opened.documents

    def documents_and_tokenizer(
        self, fraction: float | None, seed: int
    ) -> tuple[Documents, Tokenizer | None, int]:
        """The documents under a tokenizer trained on them, and the id that begins each.

        Args:
            fraction: of them that is held out, and not trained on; None for nothing.
            seed: of the choice.

        Returns:
            No tokenizer where there is no text.

        Raises:
            DataError: something about the files or the cache.
        """
        entry = self._entry(["trained", fraction, seed, tokenizers.__version__])
        opened = self._open(entry)
        if opened is None:
            tokenizer = self._train(fraction, seed)
            opened = self._make(
                entry, tokenizer, tokenizer.end_of_text if tokenizer else self.end_of_text
            )
        if opened.tokenizer is None:
            self.say(f"no tokenizer: documents begin with id {opened.end_of_text}")
            return opened.documents, None, opened.end_of_text
        tokenizer = Tokenizer.load(opened.tokenizer, self.vocab)
        self.say(
            f"a byte-level BPE of {tokenizer.size:,} entries, trained on this text, is in "
            f"{opened.tokenizer}"
        )
        return opened.documents, tokenizer, tokenizer.end_of_text

    @property
    def end_of_text(self) -> int:
        """Without a tokenizer: what the first shard begins with, else 0, as in those made here."""
        return int(self._shards[0][0]) if self._shards else 0

    @cached_property
    def _shards(self) -> list[np.ndarray]:
        return [map_shard(source.path) for source in self._mapped]

    @property
    def _mapped(self) -> list[Source]:
        return [source for source in self.sources if source.format.read is None]

    def _entry(self, rule: list[object]) -> Path:
        content = [_VERSION, self.vocab, [source.digest for source in self.sources], rule]
        return self.cache / "tokens" / digest(json.dumps(content))

    def _open(self, entry: Path) -> Entry | None:
        content = digest(" ".join(source.digest for source in self._mapped))
        opened = open_entry(entry, self._shards, self.vocab, content, self.say)
        for note, count in sorted(opened.notes.items()) if opened else ():
            self.say(f"left out: {count:,} {note}")
        return opened

    def _make(self, entry: Path, tokenizer: Tokenizer | None, end_of_text: int) -> Entry:
        reading = self._reading("tokenising")
        try:
            sweep(entry.parent)
            with Writer(entry, self.vocab) as writer:
                tokenise.encode(self.sources, self._shards, tokenizer, end_of_text, reading, writer)
                for source in self.sources:
                    source.check_unchanged()
                if not writer.documents:
                    raise DataError(
                        "the data are empty", where=self.where, fix="give files with text in them"
                    )
                writer.commit(end_of_text, dict(reading.notes), tokenizer)
        except OSError as error:
            raise DataError(
                f"the cache cannot be written: {error.strerror or error}",
                where=str(self.cache),
                fix="make room there, or make it writable",
            ) from error
        opened = self._open(entry)
        if opened is None:
            raise DataError(
                "the cache did not keep what was written to it",
                where=str(entry),
                fix="look after the disk that it is on",
            )
        return opened

    def _train(self, fraction: float | None, seed: int) -> Tokenizer | None:
        found = tokenise.survey(self.sources, self._reading("reading"))
        if not found.texts:
            return None
        if found.ids or self._mapped:
            raise DataError(
                "the data hold text and ids, and a tokenizer trained here would not be theirs",
                where=self.where,
                fix="name the tokenizer that the ids were made with: data.tokenizer=PATH",
            )
        reading = self._reading("training a tokenizer")
        texts = tokenise.training_texts(self.sources, reading, found, fraction, seed)
        return Tokenizer.train(texts, self.vocab)

    def _reading(self, what: str) -> Reading:
        return tokenise.reading(self.sources, self.vocab, what, self.progress)
