"""Fingerprints of documents for deduplication: digests, shingles, MinHash signatures, windows of words.

Worker processes import this module and little else, so that they start fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash

from minillm_core import ConfigError
from minillm_data.words import PRINTED, WORD, hashed, shingles, windows

THRESHOLD, SHINGLE = 0.8, 4

PERMUTATIONS = 128
"""Number of hashes in a MinHash signature."""

_SEED = 1


@dataclass(frozen=True)
class Rules:
    """The definition of a duplicate.

    Attributes:
        threshold: Jaccard similarity of near duplicates, 0.1 to 1; None: not searched.
        shingle: words of a shingle.
        spans: words of a window to cut where an earlier document contains it; None: no spans are cut.
        min_words: minimum words of a document after cutting; with fewer it is dropped.
    """

    threshold: float | None = THRESHOLD
    shingle: int = SHINGLE
    spans: int | None = None
    min_words: int = 0

    @classmethod
    def of(
        cls,
        near: bool,
        threshold: float | None,
        shingle: int | None,
        spans: int | None,
        min_words: int | None,
    ) -> Rules:
        """Build the rules from options; None: the option was not given.

        Raises:
            ConfigError: a value is out of its range, or an option has no effect.
        """
        bounds = (
            ("--threshold", threshold, 0.1, 1),
            ("--shingle", shingle, 1, 100),
            ("--spans", spans, 2, 10_000),
            ("--min-words", min_words, 1, 1_000_000),
        )
        for flag, value, least, most in bounds:
            if value is not None and not least <= value <= most:
                fix = f"between {least:,} and {most:,}"
                raise ConfigError(f"{flag} {value} is out of its range", where=flag, fix=fix)
        useless = (
            ("--threshold", threshold, near, "--no-near", "near duplicates are not looked for"),
            ("--shingle", shingle, near, "--no-near", "near duplicates are not looked for"),
            ("--min-words", min_words, spans, "no --spans", "nothing is cut out"),
        )
        for flag, value, serves, cause, why in useless:
            if value is not None and not serves:
                what = f"{flag} has no effect with {cause}: {why}"
                raise ConfigError(what, where=flag, fix=f"take {flag} away")
        return cls(
            (THRESHOLD if threshold is None else threshold) if near else None,
            shingle or SHINGLE,
            spans,
            min_words or spans or 0,
        )


class Content(NamedTuple):
    """The compared content of a row: a text, whose words are hashed, or ids; and the digest's input."""

    words: str | list[int]
    whole: str | None = None  # the digest's input for a chat; None: ``words``

    def digest(self) -> bytes:
        """Hash the whole content by xxh3-128; digests of texts, chats and ids are distinct."""
        if self.whole is not None:
            return xxhash.xxh3_128_digest(self.whole.encode(), seed=1)
        if isinstance(self.words, str):
            return xxhash.xxh3_128_digest(self.words.encode())
        return xxhash.xxh3_128_digest(np.array(self.words, np.uint32).tobytes(), seed=2)


class Signed(NamedTuple):
    """The stored fingerprints of a batch of documents."""

    digests: np.ndarray  # uint64 (documents, 2)
    counts: np.ndarray  # int64 (documents, 2): shingles, windows
    shingles: np.ndarray  # uint64, concatenated over the documents
    signatures: np.ndarray  # uint32 (documents, PERMUTATIONS), or (0, PERMUTATIONS)
    windows: np.ndarray  # uint64


def sign(rules: Rules, batch: Sequence[Content]) -> Signed:
    """Compute the fingerprints of documents; runs in a worker process."""
    none = np.zeros(0, np.uint64)
    digests, sets, runs = [], [none], [none]
    counts = np.zeros((len(batch), 2), np.int64)
    for number, content in enumerate(batch):
        digests.append(np.frombuffer(content.digest(), np.uint64))
        if rules.threshold is not None:
            sets.append(shingles(_words(content.words), rules.shingle))
            counts[number, 0] = len(sets[-1])
        if rules.spans is not None:
            assert isinstance(content.words, str)
            runs.append(windows(hashed(PRINTED.findall(content.words)), rules.spans))
            counts[number, 1] = len(runs[-1])
    flat = np.concatenate(sets)
    return Signed(
        np.stack(digests), counts, flat, _minhash(flat, counts, rules), np.concatenate(runs)
    )


def _words(words: str | list[int]) -> np.ndarray:
    """Hash a text's words in lower case, for near-duplicate shingles; ids stay as they are."""
    if isinstance(words, str):
        return hashed(WORD.findall(words.lower()))
    return np.array(words, np.uint64)


def _minhash(flat: np.ndarray, counts: np.ndarray, rules: Rules) -> np.ndarray:
    """Compute MinHash signatures of concatenated shingle sets; none where near duplicates are not searched."""
    if rules.threshold is None:
        return np.zeros((0, PERMUTATIONS), np.uint32)
    from rensa import RMinHash  # type: ignore[attr-defined]

    bounds = np.concatenate([np.zeros(1, np.uint64), np.cumsum(counts[:, 0]).astype(np.uint64)])
    found = RMinHash.digest_matrix_from_flat_token_hashes(flat, bounds, PERMUTATIONS, _SEED)
    return np.array(found.to_rows(), np.uint32).reshape(len(counts), PERMUTATIONS)
