"""Groups of duplicate documents: equal digests, MinHash LSH (banding), and exact Jaccard similarity."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from minillm_core.documents import Progress
from minillm_data.signatures import PERMUTATIONS
from minillm_data.words import mixed

FOUND = 0.9995
"""Minimum probability that a pair at the similarity threshold shares a band."""

_DEVIATIONS = 3.3
"""Standard deviations below the threshold at which a MinHash estimate rules a pair out: this misses
one in 2,000 of the pairs at the threshold."""

_BLOCK = 1 << 13
"""Signatures copied into memory at a time: 4 MiB."""


def rows_of(threshold: float) -> int:
    """Choose the number of rows (hashes) per LSH band: the largest that FOUND allows.

    A pair of similarity s shares one of b bands of r rows with probability 1 - (1 - s^r)^b; more
    rows per band mean fewer false candidates. Below a threshold of 0.06 even one row is too many.
    """
    fit = (r for r in range(PERMUTATIONS, 0, -1) if _found(threshold, r) >= FOUND)
    return next(fit, 1)


def _found(similarity: float, rows: int) -> float:
    return 1.0 - (1.0 - similarity**rows) ** (PERMUTATIONS // rows)


def jaccard(one: np.ndarray, other: np.ndarray) -> float:
    """Compute the Jaccard similarity of two sets, given as sorted arrays of unique values."""
    shared = len(np.intersect1d(one, other, assume_unique=True))
    either = len(one) + len(other) - shared
    return shared / either if either else 0.0


def equal(digests: np.ndarray) -> np.ndarray:
    """Find the first document with the same digest, for each document.

    Args:
        digests: uint64 (documents, 2).

    Returns:
        int64 (documents,): an earlier document, or the document itself.
    """
    order = np.lexsort(
        (digests[:, 1], digests[:, 0])
    )  # stable: equal digests stay in document order
    ordered = digests[order]
    new = np.ones(len(order), bool)
    new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    first = np.empty(len(order), np.int64)
    first[order] = order[np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))]
    return first


class Groups:
    """A union-find of documents; a group is identified by its first document."""

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
        """Merge the groups of two documents."""
        groups = self.of(np.array([one, other]))
        self._above[groups.max()] = groups.min()


def similar(
    signatures: np.ndarray,
    among: np.ndarray,
    threshold: float,
    shingles: Callable[[int], np.ndarray],
    progress: Progress | None = None,
) -> np.ndarray:
    """Group documents whose shingle sets have a Jaccard similarity of at least the threshold.

    Candidate pairs share an LSH band (Leskovec, Rajaraman and Ullman, Mining of Massive Datasets,
    3.4); pairs whose signatures agree well enough are compared exactly. Groups are the connected
    components of similar pairs, so two documents of a group may be less similar than the threshold.

    Memory: 40 bytes per document. Time: n documents that share a band are n^2 / 2 pairs of some 40 ns
    each, less if they are already in one group; 10,000 pages of one template take a minute.

    Args:
        signatures: uint32 (documents, PERMUTATIONS), usually a memory map.
        among: documents to compare, in order.
        threshold: 0.1 to 1.
        shingles: returns a document's shingles, sorted and unique.
        progress: called with the processed bytes of the signatures, and the total.

    Returns:
        int64 (documents,): the first document of each document's group; itself if it is alone.
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
        """Compare each pair of documents that share a band; yield the number of documents done."""
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
        """Merge a document with the similar ones among others that are not in its group yet."""
        apart = np.flatnonzero(self.groups.of(others) != self.groups.of(np.array([one])))
        if len(apart) < len(others):
            others, signatures = others[apart], signatures[apart]
        same = signatures == own
        # sums of at most PERMUTATIONS: they fit into einsum's uint8 accumulator
        near = np.flatnonzero(np.einsum("ij->i", same.view(np.uint8)) >= self._agree)
        earlier = same[near, : band * self.rows].reshape(len(near), band, self.rows)
        near = near[~earlier.all(axis=2).any(axis=1)]  # the rest were compared in an earlier band
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
    """Yield (start, indices) of each key that occurs more than once; ``start`` counts the indices before."""
    order = np.argsort(keys, kind="stable")
    ends = np.flatnonzero(np.diff(keys[order])) + 1
    bounds = np.concatenate([np.zeros(1, np.int64), ends, np.array([len(order)])])
    for start, end in np.stack([bounds[:-1], bounds[1:]], axis=1)[np.diff(bounds) > 1].tolist():
        yield start, order[start:end]
