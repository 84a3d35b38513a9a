"""Groups of equal and of similar documents: digests, MinHash signatures in bands, exact Jaccard."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from minillm_core.documents import Progress
from minillm_data.signatures import PERMUTATIONS
from minillm_data.words import mixed

FOUND = 0.9995
"""The least probability that a pair whose similarity is the threshold shares a band."""

_DEVIATIONS = 4.0
"""An estimate is this many standard deviations below the threshold before a pair is left unread."""

_BLOCK = 1 << 13
"""Signatures that are copied into memory at a time: 4 MiB."""


def rows_of(threshold: float) -> int:
    """Choose how many numbers of a signature make a band: as many as FOUND allows.

    A pair of similarity s shares one of b bands of r numbers with probability 1 - (1 - s^r)^b; more
    numbers a band mean fewer pairs to be compared in vain. None suffices below a threshold of 0.06.
    """
    fit = (r for r in range(PERMUTATIONS, 0, -1) if _found(threshold, r) >= FOUND)
    return next(fit, 1)


def _found(similarity: float, rows: int) -> float:
    return 1.0 - (1.0 - similarity**rows) ** (PERMUTATIONS // rows)


def jaccard(one: np.ndarray, other: np.ndarray) -> float:
    """Divide what two sets share by what either holds; sorted arrays, each value once."""
    shared = len(np.intersect1d(one, other, assume_unique=True))
    either = len(one) + len(other) - shared
    return shared / either if either else 0.0


def equal(digests: np.ndarray) -> np.ndarray:
    """Find for each document the first that has its digest.

    Args:
        digests: uint64 (documents, 2).

    Returns:
        int64 (documents,): an earlier document, or itself.
    """
    order = np.lexsort(
        (digests[:, 1], digests[:, 0])
    )  # stable: the first of equal ones comes first
    ordered = digests[order]
    new = np.ones(len(order), bool)
    new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    first = np.empty(len(order), np.int64)
    first[order] = order[np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))]
    return first


class Groups:
    """Documents in groups that only grow; a group is named by its first document."""

    def __init__(self, documents: int) -> None:
        self._above = np.arange(documents)

    def of(self, documents: np.ndarray) -> np.ndarray:
        """Return each document's group."""
        found = self._above[documents]
        while ((above := self._above[found]) != found).any():
            found = above
        self._above[documents] = found
        return found

    def join(self, one: int, other: int) -> None:
        """Make one group of two documents' groups."""
        groups = self.of(np.array([one, other]))
        self._above[groups.max()] = groups.min()


def similar(
    signatures: np.ndarray,
    among: np.ndarray,
    threshold: float,
    shingles: Callable[[int], np.ndarray],
    progress: Progress | None = None,
) -> np.ndarray:
    """Group documents whose shingles have a Jaccard similarity of the threshold, or more.

    Candidates share a band of their signatures (Leskovec, Rajaraman and Ullman, Mining of Massive
    Datasets, 3.4); those whose signatures agree well enough are compared exactly. A group holds whoever
    is linked by such pairs, so that two of its documents may be less similar than the threshold.

    Memory: 40 bytes for each document.

    Args:
        signatures: uint32 (documents, PERMUTATIONS), as a rule a memory map.
        among: documents to compare, in order.
        threshold: 0.1 to 1.
        shingles: a document's set, sorted, each value once.
        progress: called with the bytes of the signatures that are dealt with, and those in all.

    Returns:
        int64 (documents,): the first of each document's group, itself where it is alone.
    """
    groups = Groups(len(signatures))
    rows = rows_of(threshold)
    bands = PERMUTATIONS // rows
    deviation = (threshold * (1.0 - threshold) / PERMUTATIONS) ** 0.5
    agree = (threshold - _DEVIATIONS * deviation) * PERMUTATIONS
    size = len(signatures) * rows * 4
    for band in range(bands):
        if progress:
            progress("looking for near duplicates", band * size, bands * size)
        for bucket in _buckets(_keys(signatures, among, band * rows, rows)):
            members = among[bucket]
            for number, one in enumerate(members[:-1].tolist()):
                for others in np.array_split(
                    rest := members[number + 1 :], len(rest) // _BLOCK + 1
                ):
                    _compare(
                        groups, signatures, one, others, band, rows, agree, threshold, shingles
                    )
    return groups.of(np.arange(len(signatures)))


def _compare(
    groups: Groups,
    signatures: np.ndarray,
    one: int,
    others: np.ndarray,
    band: int,
    rows: int,
    agree: float,
    threshold: float,
    shingles: Callable[[int], np.ndarray],
) -> None:
    """Join a document with those of the others that are similar to it."""
    others = others[groups.of(others) != groups.of(np.array([one]))]
    if not len(others):
        return
    same = signatures[others] == signatures[one]
    earlier = same[:, : band * rows].reshape(len(others), band, rows)
    seen = earlier.all(axis=2).any(axis=1)  # the pair was compared in an earlier band
    close = others[(same.sum(axis=1) >= agree) & ~seen]
    own = shingles(one) if len(close) else None
    for other in close.tolist():
        if own is not None and jaccard(own, shingles(other)) >= threshold:
            groups.join(one, other)


def _keys(signatures: np.ndarray, among: np.ndarray, first: int, rows: int) -> np.ndarray:
    """Hash a band of each signature: uint64 (among,)."""
    keys = np.zeros(len(among), np.uint64)
    for start in range(0, len(among), _BLOCK):
        band = signatures[among[start : start + _BLOCK], first : first + rows]
        for column in band.T.astype(np.uint64):
            block = keys[start : start + _BLOCK]
            block[:] = mixed(block * np.uint64(0x9E3779B97F4A7C15) + column)
    return keys


def _buckets(keys: np.ndarray) -> Iterator[np.ndarray]:
    """Give the indices of each key that is there more than once, in order."""
    order = np.argsort(keys, kind="stable")
    ends = np.flatnonzero(np.diff(keys[order])) + 1
    bounds = np.concatenate([np.zeros(1, np.int64), ends, np.array([len(order)])])
    for start, end in np.stack([bounds[:-1], bounds[1:]], axis=1)[np.diff(bounds) > 1].tolist():
        yield order[start:end]
