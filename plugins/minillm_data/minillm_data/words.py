"""Hashes of words, word windows and shingles, for deduplication."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
import xxhash

# Scripts written without spaces (Thai, Lao, Tibetan, Burmese, Khmer, Han, kana): a whole run would be
# one word, so each character counts as a word.
_ALONE = (
    r"\u0e00-\u109f\u1780-\u17ff\u2e80-\u2fdf\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff"
    r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
WORD = re.compile(rf"[^\W{_ALONE}]+|[{_ALONE}]")
"""A run of letters, digits and underscores; or one character of a script without spaces."""
PRINTED = re.compile(rf"[^\s{_ALONE}]+|[{_ALONE}]")
"""A run of non-whitespace characters, punctuation included; or one character of a script without spaces."""

_ODD = np.uint64(0x9E3779B97F4A7C15)


def hashed(words: Iterable[str]) -> np.ndarray:
    """Hash each word by xxh3-64: uint64 (words,)."""
    return np.fromiter(map(xxhash.xxh3_64_intdigest, map(str.encode, words)), np.uint64)


def windows(words: np.ndarray, width: int) -> np.ndarray:
    """Hash each run of ``width`` consecutive words.

    Args:
        words: uint64 (words,).
        width: words of a run, at least 1.

    Returns:
        uint64 (words - width + 1,); empty with fewer than ``width`` words.
    """
    if len(words) < width:
        return np.zeros(0, np.uint64)
    found, covered = mixed(words), 1
    while covered < width:  # two overlapping or adjacent runs of one length form a longer run
        step = min(covered, width - covered)
        found = mixed(found[:-step] * _ODD + found[step:])
        covered += step
    return found


def shingles(words: np.ndarray, width: int) -> np.ndarray:
    """Compute a document's shingles: the set of hashed runs of ``width`` words, for MinHash and Jaccard.

    A document of fewer words has a single shingle of all its words; an empty one has none.

    Returns:
        uint64, sorted and unique.
    """
    return np.unique(windows(words, min(width, len(words)))) if len(words) else words


def mixed(values: np.ndarray) -> np.ndarray:
    """Mix values over all 64 bits, bijectively (the finaliser of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
