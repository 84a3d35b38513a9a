"""Tokenizer: text to ids and back, by ``tokenizers``, with special tokens in the text encoded as text.

The end-of-text id only marks where a document begins: ``<|endoftext|>`` spelt out in a document is encoded
as its thirteen characters.
"""

from __future__ import annotations

import base64
import codecs
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tokenizers
from tokenizers import pre_tokenizers

from minillm_core import disk
from minillm_core.data import bpe
from minillm_core.data.bpe import END_OF_TEXT
from minillm_core.data.cutting import BOUNDARY, LEARNED, PIECE, WORD, Continued, divide, parts
from minillm_core.errors import DataError
from minillm_core.install import installed_version, pip_line
from minillm_core.plugins.sourcing import Reserved

T = TypeVar("T")

_TOGETHER = 1 << 17  # characters encoded in one call, during which Python handles no signal
_LONG = 1 << 20  # characters of cut words that a tokenizer is trained on
LARGEST_TOKENIZER = 1 << 27  # bytes of a tokenizer.json; the largest in use have a quarter
_CUT = f"cut: words longer than {WORD:,} characters"
_DIVIDED = "cut: times, between lines, texts longer than 1 MiB"
_UNUSUAL = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
_UNUSUAL += ("byte_fallback", "ignore_merges")  # options of a BPE, all off in those trained here
_PROBE = "the cat, that sat"  # split into words, to see whether anything between them is lost
_GROWTH = 64  # times that a tokenizer may lengthen a text; NFKC makes 18 characters of one


def grouped(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Group items, in order, into lists that end when the sum of sizes reaches a limit."""
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
    """A tokenizer with an end-of-text id; from :meth:`train` or :meth:`load`."""

    def __init__(self, native: tokenizers.Tokenizer, token: str = END_OF_TEXT) -> None:
        native.encode_special_tokens = True  # encode special tokens as text: never match them
        self._native = native
        self.size: int = max(native.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        end_of_text = native.token_to_id(token)
        if end_of_text is None:
            raise ValueError(f"no {token}")
        self.end_of_text: int = end_of_text
        self.end_of_text_token = token
        # They begin a text: see :meth:`with_start_token`.
        self.start, self.start_token = end_of_text, token

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab: int,
        beat: Callable[[], None] = lambda: None,
        specials: Sequence[Reserved] = (),
    ) -> Tokenizer:
        """Train a byte-level BPE of at most ``vocab`` entries, the end-of-text id being 0.

        The same texts give the same tokenizer. Little text gives fewer entries: a pair of tokens becomes an entry
        if it occurs twice. Of words that are too long (see :mod:`minillm_core.data.cutting`) a bounded amount is
        trained on.

        Args:
            texts: without lone surrogates.
            vocab: most entries.
            beat: called several times a second.
            specials: reserved tokens, with ids from 1 on.

        Raises:
            DataError: vocab has no room for the 256 bytes and the end-of-text id, or the training
                process cannot be started or was killed.
        """
        reserved = sorted({one.text for one in specials} - {END_OF_TEXT})
        least = len(pre_tokenizers.ByteLevel.alphabet()) + 1 + len(reserved)
        if vocab < least:
            what = f"a byte-level tokenizer has at least {least} entries"
            fix = f"set model.vocab to {least} or more, preferably 4096"
            raise DataError(what, where=f"model.vocab={vocab}", fix=fix)
        try:
            learned = bpe.train_bpe(_trained_on(texts, beat), vocab, beat, reserved)
        except OSError as error:
            reason = str(error) if isinstance(error, ChildProcessError) else error.strerror or error
            raise DataError(
                f"training the tokenizer failed: {reason}",
                where="the process that trains it, and its files in $TMPDIR",
                fix="free memory or disk space there, or name a tokenizer: data.tokenizer=PATH",
            ) from error
        return cls(tokenizers.Tokenizer.from_str(learned))

    @classmethod
    def load(cls, path: Path, vocab: int, end_of_text: str | None = None) -> Tokenizer:
        """Load a tokenizer.json.

        Args:
            path: of the file.
            vocab: rows of the embedding; the tokenizer may have fewer entries, not more.
            end_of_text: the special token that begins documents; None: <|endoftext|>.

        Raises:
            DataError: it cannot be read, is too large, has no such special token, drops merges at
                random (BPE dropout), can make a text many times as long, or its ids do not spell texts.
        """
        token = end_of_text or END_OF_TEXT
        try:
            native = tokenizers.Tokenizer.from_str(
                disk.read_file(path, LARGEST_TOKENIZER, links=True).decode("utf-8")
            )
            growth = _growth(json.loads(native.to_str()))
        except Exception as error:  # tokenizers raises Exception itself
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            what = f"the tokenizer cannot be read: {reason}"
            fix = "give a tokenizer.json as the tokenizers library writes it"
            raise DataError(what, where=str(path), fix=fix) from error
        if growth > _GROWTH:
            what = f"the tokenizer can make a text {growth:,} times as long; {_GROWTH} are allowed"
            where = f"{path}: Replace or Precompiled in normalizer or decoder"
            fix = "use another tokenizer: this one can fill the memory"
            raise DataError(what, where=where, fix=fix)
        native.no_truncation()
        native.no_padding()
        native.post_processor = None  # the tokens that it adds are not used
        special = {t.content for t in native.get_added_tokens_decoder().values() if t.special}
        if token not in special:
            own = f", or name one of its own: data.end_of_text={min(special)}" if special else ""
            what = f"the tokenizer has no special token {token}"
            fix = f"add {token} to it as a special token{own}"
            raise DataError(what, where=f"{path}: added_tokens", fix=fix)
        if getattr(native.model, "dropout", None):
            what = "the tokenizer drops merges at random, so that no run could be repeated"
            raise DataError(what, where=f"{path}: model.dropout", fix="set model.dropout to null")
        tokenizer = cls(native, token)
        if not tokenizer._spells():
            what = "the tokenizer's ids do not spell a text: spaces are lost, or marks (##, </w>) added"
            fix = "use a byte-level BPE, or one like SentencePiece's, whose tokens hold the spaces"
            raise DataError(what, where=f"{path}: pre_tokenizer, model", fix=fix)
        if tokenizer.size > vocab:
            what = f"the tokenizer has {tokenizer.size} entries, more than model.vocab={vocab}"
            fix = f"set model.vocab={tokenizer.size} or more, or use a smaller tokenizer"
            raise DataError(what, where=str(path), fix=fix)
        return tokenizer

    def with_start_token(self, token: str, where: str) -> Tokenizer:
        """Set another special token to begin texts than the end-of-text token.

        Raises:
            DataError: it has no such token.
        """
        if (start := self._native.token_to_id(token)) is None:
            what = f"the tokenizer has no token {token!r}, with which its texts begin"
            raise DataError(what, where=where, fix="fetch or write the directory again")
        self.start, self.start_token = start, token
        return self

    def reserve(self, specials: Sequence[Reserved], vocab: int) -> dict[str, int]:
        """Return the ids of special tokens by name; add those that allow it.

        Call it before anything is encoded. ``end_of_text`` is included.

        Args:
            specials: the tokens.
            vocab: rows of the embedding, the upper bound of ids.

        Raises:
            DataError: the tokenizer lacks a special token, or the embedding a row for it.
        """
        known = {t.content for t in self._native.get_added_tokens_decoder().values() if t.special}
        for one in (one for one in specials if one.text not in known):
            if one.add and self.size < vocab:
                self._native.add_special_tokens([one.text])
            if self._native.token_to_id(one.text) != self.size:  # not added, or ids have gaps
                room = f": it has {self.size} ids in {vocab} rows" if one.add else ""
                instead = one.instead or f"options without it (minillm plugins info {one.owner})"
                raise DataError(
                    f"the tokenizer has no special token {one.text} for plugin '{one.owner}'{room}",
                    where=f"added_tokens: {', '.join(sorted(known)[:8])}",
                    fix=f"{instead}; or a new model without data.tokenizer, --branch and --init, whose "
                    "tokenizer is trained with it",
                )
            self.size += 1
        entries = self._native.get_vocab(with_added_tokens=True)
        return {"end_of_text": self.end_of_text, **{s.name: entries[s.text] for s in specials}}

    def encode(
        self,
        texts: Sequence[str],
        notes: Counter[str] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> list[np.ndarray]:
        """Encode each text, on all cores, to ids, int32 (tokens,), without end-of-text ids.

        Args:
            texts: without lone surrogates.
            notes: counts cuts.
            stop: polled several times a second; True raises an InterruptedError.
        """
        notes = Counter() if notes is None else notes
        pieces = ((i, part) for i, text in enumerate(texts) for part in self._parts(text, notes))
        found: list[list[np.ndarray]] = [[np.zeros(0, np.int32)] for _ in texts]
        for group in grouped(pieces, lambda piece: len(piece[1]), _TOGETHER):
            if stop():
                raise InterruptedError
            encoded = self._encoded([part for _, part in group])
            for (index, _), ids in zip(group, encoded, strict=True):
                found[index].append(ids)
        return [np.concatenate(arrays) for arrays in found]

    @property
    def encoder(self) -> str:
        """The name of the encoding library, with the way to a faster one if that would apply."""
        if self._fastokens is not None:
            return f"fastokens {installed_version('fastokens')}, with the ids of tokenizers"
        here = f"tokenizers {tokenizers.__version__}"
        if self._divides and installed_version("fastokens") is None:
            return f"{here}; many times as fast: {pip_line('minillm-core[fast]')}"
        return here

    def _encoded(self, texts: list[str]) -> Sequence[np.ndarray]:
        if self._fastokens is None:
            found = self._native.encode_batch_fast(texts, add_special_tokens=False)
            return [np.array(one.ids, np.int32) for one in found]
        data, ends = self._fastokens.encode_batch_flat(texts, split_special_tokens=True)
        ids = np.frombuffer(data, "<u4").astype(np.int32)
        return np.split(ids, np.frombuffer(ends, "<u8")[1:-1].astype(np.int64))

    @cached_property
    def _fastokens(self) -> Any | None:
        """The same tokenizer in fastokens; None: not installed, or of a kind that it may encode differently."""
        model = self._data["model"]
        if not self._divides or model["type"] != "BPE" or any(map(model.get, _UNUSUAL)):
            return None
        try:
            from fastokens import Tokenizer as Quick

            return Quick.from_json_str(self._native.to_str())
        except (ImportError, ValueError, RuntimeError):
            return None

    def decode(self, ids: Iterable[int], *, specials: bool = False) -> str:
        """Decode ids to text; invalid UTF-8 becomes U+FFFD, unused ids are dropped.

        Args:
            ids: each >= 0.
            specials: include the text of special tokens.
        """
        return self._native.decode([int(i) for i in ids], skip_special_tokens=not specials)

    def stream(self) -> Callable[[int], str]:
        """Return a decoder that takes ids one by one and returns the text that each completes.

        A character is returned once all its bytes are there; invalid UTF-8 becomes U+FFFD, and special and unused
        ids are dropped, as in :meth:`decode`. A decoder's change at the beginning of a text is not applied: the
        ids continue another text.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda index: decoder.decode(self._bytes.get(int(index), b""))

    def used_ids(self) -> np.ndarray:
        """Return the ids in use, ascending, int32 (n,)."""
        return np.array(sorted(self._bytes), np.int32)

    def text(self) -> str:
        """Return the content of its tokenizer.json."""
        return self._native.to_str(pretty=True)

    def save(self, path: Path) -> None:
        """Write a tokenizer.json atomically.

        Leftovers of killed processes beside it are removed: no other process may write there.

        Raises:
            OSError: it cannot be written.
        """
        for left in path.parent.glob(f"{path.name}.tmp-*"):
            with suppress(OSError):
                left.unlink()
        disk.replace(path, self.text().encode("utf-8"))

    @cached_property
    def digest(self) -> str:
        """The sha256 digest of everything that affects its encoding."""
        return hashlib.sha256(self._native.to_str().encode("utf-8")).hexdigest()

    @cached_property
    def _data(self) -> dict[str, Any]:
        return json.loads(self._native.to_str())

    @cached_property
    def _spell(self) -> Callable[[str], bytes]:
        """The function from a token to its bytes: byte-level, or of the SentencePiece kind."""
        words = [self._data["pre_tokenizer"], self._data["decoder"]]
        return _byte_level() if '"ByteLevel"' in json.dumps(words) else _sentence_piece

    @cached_property
    def _probed(self) -> tuple[bytes, bytes]:
        """The bytes of a text, normalized, and of the words that it is split into."""
        change, split = self._native.normalizer, self._native.pre_tokenizer
        text = change.normalize_str(_PROBE) if change else _PROBE
        words = split.pre_tokenize_str(text) if split else [(text, ())]
        return self._spell(text), b"".join(self._spell(word) for word, _ in words)

    def _spells(self) -> bool:
        """Return whether the bytes of a text's ids are the normalized text, but for a space in front."""
        model, (text, words) = self._data["model"], self._probed
        marked = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
        return not marked and words.strip() == text.strip()

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        """Id -> its UTF-8 bytes, empty for special tokens; ids in use only."""
        entries = self._native.get_vocab(with_added_tokens=False)
        found = {index: self._spell(token) for token, index in entries.items()}
        for index, token in self._native.get_added_tokens_decoder().items():
            found[index] = b"" if token.special else token.content.encode("utf-8")
        return found

    @cached_property
    def _divides(self) -> bool:
        """Whether a text may be divided between two words without changing its ids."""
        plain = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
        words, added = self._data["pre_tokenizer"] or {}, self._data["added_tokens"]
        whole = self._data["normalizer"] is None and not any(map(_spans_boundary, added))
        return whole and plain.items() <= words.items()

    def _parts(self, text: str, notes: Counter[str]) -> Iterator[str]:
        if self._divides:
            goes_on = isinstance(text, Continued)  # perhaps in the middle of such a word
            for part, number in parts(text):
                if number == 1 and not goes_on:
                    notes[_CUT] += 1
                goes_on = False
                yield part
            return
        notes.update([_DIVIDED] * isinstance(text, Continued))
        while len(text) > PIECE:
            end = divide(text[:PIECE])
            notes[_DIVIDED] += 1
            yield text[:end]
            text = text[end:]
        yield text


def _spans_boundary(token: dict[str, Any]) -> bool:
    """Return whether a text could be divided within this added token, or beside it with another result."""
    beside = token["lstrip"] or token["rstrip"] or token["single_word"]
    return not token["special"] and bool(beside or BOUNDARY.search(token["content"]))


def _trained_on(texts: Iterable[str], beat: Callable[[], None]) -> Iterator[str]:
    """Yield the parts of some texts; of cut words only the first _LONG characters."""
    left = _LONG
    for text in texts:
        beat()
        for part, cut in parts(text, LEARNED):
            left -= len(part) if cut else 0
            if left >= 0 or not cut:
                yield part


def _growth(data: dict[str, Any]) -> int:
    """Return an upper bound of a text's growth before, in or after the model."""
    return max(_factor(data[key]) for key in ("normalizer", "pre_tokenizer", "model", "decoder"))


def _factor(step: Any) -> int:
    if not isinstance(step, dict):
        return 1
    if step.get("type") == "Precompiled":  # a table of texts, after a tree and its size
        table = base64.b64decode(step["precompiled_charsmap"])
        texts = table[4 + int.from_bytes(table[:4], "little") :]
        return max(1, *(len(text.decode("utf-8", "replace")) for text in texts.split(b"\0")))
    factor = 1
    for key in ("content", "prepend", "continuing_subword_prefix", "end_of_word_suffix"):
        if isinstance(step.get(key), str):
            factor *= max(len(step[key]), 1)
    for key in ("normalizers", "pretokenizers", "decoders"):  # of a Sequence
        for inner in step.get(key) or ():
            factor *= _factor(inner)
    return factor


def bytes_per_token(tokenizer: Tokenizer, vocab: int | None = None) -> np.ndarray:
    """Count the UTF-8 bytes of each id: int32 (vocab,), 0 for special and unused ids.

    An id that begins documents has -1 if the tokenizer puts a space in front of a text, so that the sum
    over a document has the bytes of its text.

    Args:
        tokenizer: byte-level, or of the SentencePiece kind.
        vocab: rows of the embedding; default: the tokenizer's size.
    """
    found = np.array([*map(len, bytes_by_id(tokenizer, vocab or tokenizer.size))], np.int32)
    found[[tokenizer.end_of_text, tokenizer.start]] -= tokenizer._probed[1].startswith(b" ")
    return found


def bytes_by_id(tokenizer: Tokenizer, vocab: int) -> tuple[bytes, ...]:
    """Return the UTF-8 bytes of each id below ``vocab``, empty for special and unused ids."""
    return tuple(tokenizer._bytes.get(index, b"") for index in range(vocab))


def _byte_level() -> Callable[[str], bytes]:
    """Return the function from a byte-level token to its bytes.

    A printable character is its own byte, the characters from U+0100 on are the others.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = [character for character in alphabet if ord(character) < 256]
    others = (byte for byte in range(256) if chr(byte) not in own)
    table = {one: ord(one) for one in own} | dict(zip(alphabet[len(own) :], others, strict=True))

    def spell(token: str) -> bytes:
        known = table.keys() >= {*token}  # else an entry that no text is encoded to
        return bytes(map(table.__getitem__, token)) if known else token.encode("utf-8")

    return spell


def _sentence_piece(token: str) -> bytes:
    if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
        return bytes.fromhex(token[3:5])
    return token.replace("\u2581", " ").encode("utf-8")
