"""Groups of equal and of similar documents: digests, MinHash signatures in bands, exact Jaccard."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from minillm_core.documents import Progress
from minillm_data.signatures import PERMUTATIONS
from minillm_data.words import mixed

FOUND = 0.9995
"""The least probability that a pair whose similarity is the threshold shares a band."""

_DEVIATIONS = 3.3
"""An estimate is this many standard deviations below the threshold before a pair is left unread: one
pair in 2,000 whose similarity is the threshold."""

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
    Datasets, 3.4); those whose signatures agree well enough are compared exactly. A group holds the documents
    that such pairs link, so that two of its documents may be less similar than the threshold.

    Memory: 40 bytes for each document. Time: a bucket of n documents that share a band is n^2 / 2 pairs
    at some 40 ns, less where they are in one group; 10,000 pages of one template are a minute.

    Args:
        signatures: uint32 (documents, PERMUTATIONS), as a rule a memory map.
        among: documents to compare, in order.
        threshold: 0.1 to 1.
        shingles: a document's set, sorted, each value once.
        progress: called with the bytes of the signatures that are dealt with, and those in all.

    Returns:
        int64 (documents,): the first of each document's group, itself where it is alone.
    """
    search = _Search(signatures, threshold, shingles)
    rows, size = search.rows, 4 * PERMUTATIONS * len(among)
    bands = PERMUTATIONS // rows
    for band in range(bands):
        for start, bucket in _buckets(_keys(signatures, among, band * rows, rows)):
            for done in search.compare(among[bucket], band):
                if progress:
                    share = (band + (start + done) / len(among)) / bands
                    progress("looking for near duplicates", int(share * size), size)
    return search.groups.of(np.arange(len(signatures)))


class _Search:
    """A search for similar documents; see :func:`similar`."""

    def __init__(
        self, signatures: np.ndarray, threshold: float, shingles: Callable[[int], np.ndarray]
    ) -> None:
        self._signatures, self._threshold, self._shingles = signatures, threshold, shingles
        self.groups, self.rows = Groups(len(signatures)), rows_of(threshold)
        deviation = (threshold * (1.0 - threshold) / PERMUTATIONS) ** 0.5
        self._agree = (threshold - _DEVIATIONS * deviation) * PERMUTATIONS

    def compare(self, members: np.ndarray, band: int) -> Iterator[int]:
        """Compare each pair of documents that share a band; gives how many are done, now and then."""
        for low in range(0, len(members), _BLOCK):
            ones = members[low : low + _BLOCK]
            of_ones = self._signatures[ones]
            for high in range(low, len(members), _BLOCK):
                others = members[high : high + _BLOCK]
                of_others = self._signatures[others] if high > low else of_ones
                for number, one in enumerate(ones.tolist()):
                    start = number + 1 if high == low else 0
                    own, rest = of_ones[number], of_others[start:]
                    self._compare(one, own, others[start:], rest, band)
                    yield low + number

    def _compare(
        self, one: int, own: np.ndarray, others: np.ndarray, signatures: np.ndarray, band: int
    ) -> None:
        """Join a document with those of the others that are similar to it, and not in its group yet."""
        apart = np.flatnonzero(self.groups.of(others) != self.groups.of(np.array([one])))
        if len(apart) < len(others):
            others, signatures = others[apart], signatures[apart]
        same = signatures == own
        # sums of at most PERMUTATIONS, which fit into the byte that einsum adds them up in
        near = np.flatnonzero(np.einsum("ij->i", same.view(np.uint8)) >= self._agree)
        earlier = same[near, : band * self.rows].reshape(len(near), band, self.rows)
        near = near[~earlier.all(axis=2).any(axis=1)]  # others were compared in that band
        mine = self._shingles(one) if len(near) else None
        for other in others[near].tolist():
            if mine is not None and jaccard(mine, self._shingles(other)) >= self._threshold:
                self.groups.join(one, other)


def _keys(signatures: np.ndarray, among: np.ndarray, first: int, rows: int) -> np.ndarray:
    """Hash a band of each signature: uint64 (among,)."""
    keys = np.zeros(len(among), np.uint64)
    for start in range(0, len(among), _BLOCK):
        band = signatures[among[start : start + _BLOCK], first : first + rows]
        for column in band.T.astype(np.uint64):
            block = keys[start : start + _BLOCK]
            block[:] = mixed(block * np.uint64(0x9E3779B97F4A7C15) + column)
    return keys


def _buckets(keys: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Give the indices of each key that is there more than once, in order, and how many came before."""
    order = np.argsort(keys, kind="stable")
    ends = np.flatnonzero(np.diff(keys[order])) + 1
    bounds = np.concatenate([np.zeros(1, np.int64), ends, np.array([len(order)])])
    for start, end in np.stack([bounds[:-1], bounds[1:]], axis=1)[np.diff(bounds) > 1].tolist():
        yield start, order[start:end]
