"""Text to ids and back: a wrapper around ``tokenizers`` that takes all text as text.

The end-of-text id marks where a document begins and nothing else: ``<|endoftext|>`` written out in
a document is encoded as the thirteen characters that it is.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from minillm_core.errors import DataError

__all__ = ["END_OF_TEXT", "Tokenizer", "bytes_per_token", "grouped"]

T = TypeVar("T")

END_OF_TEXT = "<|endoftext|>"

_PART = 1 << 13  # characters; longer texts are cut, so that all cores share the work
_TOGETHER = 1 << 21  # characters; what is being encoded takes some 30 times as many bytes
# Where every tokenizer of the kind below has a boundary between two of its words: \S and \s of
# Python and of the regular expressions inside ``tokenizers`` agree on these.
_CUT = re.compile(r"\S(?=[ \n])")


def grouped(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Items in order, in lists that end when their sizes reach a limit."""
    group, total = [], 0
    for item in items:
        group.append(item)
        total += size(item)
        if total >= limit:
            yield group
            group, total = [], 0
    if group:
        yield group


class Tokenizer:
    """A tokenizer with an end-of-text id; make one with :meth:`train` or :meth:`load`."""

    def __init__(self, native: tokenizers.Tokenizer) -> None:
        native.encode_special_tokens = True  # encode them as text: never match them
        self._native = native
        self.size: int = max(native.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        end_of_text = native.token_to_id(END_OF_TEXT)
        if end_of_text is None:
            raise ValueError(f"no {END_OF_TEXT}")
        self.end_of_text: int = end_of_text

    @classmethod
    def train(cls, texts: Iterable[str], vocab: int) -> Tokenizer:
        """A byte-level BPE of at most ``vocab`` entries, the end-of-text id being 0.

        The same texts give the same tokenizer. Little text gives fewer entries: a pair of tokens
        becomes an entry when it is met twice.

        Raises:
            DataError: vocab has no room for the 256 bytes and the end-of-text id.
        """
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        if vocab < len(alphabet) + 1:
            raise DataError(
                f"a byte-level tokenizer has at least {len(alphabet) + 1} entries",
                where=f"model.vocab={vocab}",
                fix=f"set model.vocab to {len(alphabet) + 1} or more, better 4096",
            )
        native = tokenizers.Tokenizer(models.BPE())
        native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore
        native.decoder = decoders.ByteLevel()  # type: ignore
        trainer = trainers.BpeTrainer(  # type: ignore
            vocab_size=vocab,
            min_frequency=2,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(alphabet),
            show_progress=False,
        )
        native.train_from_iterator(texts, trainer)
        return cls(native)

    @classmethod
    def load(cls, path: Path, vocab: int) -> Tokenizer:
        """Read a tokenizer.json.

        Args:
            path: of the file.
            vocab: rows of the embedding; the tokenizer may have fewer entries, not more.

        Raises:
            DataError: it cannot be read, is too large, has no special token <|endoftext|>, or
                drops a part of its merges at random.
        """
        try:
            native = tokenizers.Tokenizer.from_str(path.read_text("utf-8"))
        except Exception as error:  # tokenizers raises Exception itself
            raise DataError(
                f"the tokenizer cannot be read: {error}",
                where=str(path),
                fix="give a tokenizer.json as the tokenizers library writes it",
            ) from error
        native.no_truncation()
        native.no_padding()
        special = {t.content for t in native.get_added_tokens_decoder().values() if t.special}
        if END_OF_TEXT not in special:
            raise DataError(
                f"the tokenizer has no special token {END_OF_TEXT}",
                where=f"{path}: added_tokens",
                fix=f"add {END_OF_TEXT} to it as a special token",
            )
        if getattr(native.model, "dropout", None):
            raise DataError(
                "the tokenizer drops merges at random, so that no run could be repeated",
                where=f"{path}: model.dropout",
                fix="set model.dropout to null",
            )
        tokenizer = cls(native)
        if tokenizer.size > vocab:
            raise DataError(
                f"the tokenizer has {tokenizer.size} entries, more than model.vocab={vocab}",
                where=str(path),
                fix=f"set model.vocab={tokenizer.size} or more, or use a smaller tokenizer",
            )
        return tokenizer

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, int32 (tokens,), without end-of-text ids; on all cores.

        Args:
            texts: without lone surrogates.
        """
        parts = ((i, part) for i, text in enumerate(texts) for part in self._parts(text))
        found: list[list[np.ndarray]] = [[] for _ in texts]
        for group in grouped(parts, lambda part: len(part[1]), _TOGETHER):
            encoded = self._native.encode_batch_fast(
                [part for _, part in group], add_special_tokens=False
            )
            for (index, _), encoding in zip(group, encoded, strict=True):
                found[index].append(np.array(encoding.ids, np.int32))
        return [np.concatenate(arrays) for arrays in found]

    def decode(self, ids: Iterable[int], *, specials: bool = False) -> str:
        """The text of some ids; bytes that are no UTF-8 become U+FFFD, unused ids nothing.

        Args:
            ids: each >= 0.
            specials: write special tokens out too.
        """
        return self._native.decode([int(i) for i in ids], skip_special_tokens=not specials)

    def stream(self) -> Callable[[int], str]:
        """What takes ids one by one and gives the text that each of them completes.

        A character is given once all its bytes are there; bytes that are no UTF-8 become U+FFFD
        and special and unused ids nothing, as in :meth:`decode`. What a decoder does to the
        beginning of a text is left out: it is another text that is being continued.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda index: decoder.decode(self._bytes.get(int(index), b""))

    def known(self) -> np.ndarray:
        """The ids in use, ascending, int32 (n,)."""
        return np.array(sorted(self._bytes), np.int32)

    def save(self, path: Path) -> None:
        """Write a tokenizer.json; readers see all of it or nothing."""
        temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
        try:
            temporary.write_text(self._native.to_str(pretty=True), "utf-8")
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    @cached_property
    def digest(self) -> str:
        """sha256 of everything that decides how it encodes."""
        return hashlib.sha256(self._native.to_str().encode("utf-8")).hexdigest()

    @cached_property
    def _data(self) -> dict[str, Any]:
        return json.loads(self._native.to_str())

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        """Id -> the UTF-8 bytes that it stands for, none for specials; ids in use only.

        The tokenizer is byte-level, or of the SentencePiece kind.
        """
        byte_level = '"ByteLevel"' in json.dumps(
            [self._data["pre_tokenizer"], self._data["decoder"]]
        )
        spell = _byte_level() if byte_level else _sentence_piece
        found = {
            index: spell(token)
            for token, index in self._native.get_vocab(with_added_tokens=False).items()
        }
        for index, token in self._native.get_added_tokens_decoder().items():
            found[index] = b"" if token.special else token.content.encode("utf-8")
        return found

    @cached_property
    def _cuts(self) -> bool:
        """True where a long text may be cut before a space without changing its ids."""
        plain = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
        words = self._data["pre_tokenizer"] or {}
        return self._data["normalizer"] is None and plain.items() <= words.items()

    def _parts(self, text: str) -> Iterator[str]:
        start = 0
        while self._cuts and len(text) - start > _PART:
            cut = _CUT.search(text, start + _PART)
            if cut is None:
                break
            yield text[start : cut.end()]
            start = cut.end()
        yield text[start:]


def bytes_per_token(tokenizer: Tokenizer, vocab: int | None = None) -> np.ndarray:
    """UTF-8 bytes that each id stands for: int32 (vocab,), 0 for special and unused ids.

    Args:
        tokenizer: byte-level, or of the SentencePiece kind.
        vocab: rows of the embedding; default: the tokenizer's size.
    """
    lengths = np.zeros(max(vocab or 0, tokenizer.size), np.int32)
    for index, written in tokenizer._bytes.items():
        lengths[index] = len(written)
    return lengths[: vocab or tokenizer.size]


def _byte_level() -> Callable[[str], bytes]:
    """Token -> bytes where a character stands for a byte: for its own if that one can be printed,
    the characters from U+0100 on for the others, in order.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = [character for character in alphabet if ord(character) < 256]
    others = (byte for byte in range(256) if chr(byte) not in own)
    table = {character: ord(character) for character in own}
    table |= zip(alphabet[len(own) :], others, strict=True)

    def spell(token: str) -> bytes:
        try:
            return bytes(table[character] for character in token)
        except KeyError:  # an entry that no text is encoded to
            return token.encode("utf-8")

    return spell


def _sentence_piece(token: str) -> bytes:
    if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
        return bytes.fromhex(token[3:5])
    return token.replace("\u2581", " ").encode("utf-8")
