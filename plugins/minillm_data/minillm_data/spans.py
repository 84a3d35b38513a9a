"""Span deduplication: find spans of words that an earlier document contains, and cut them out.

Lee et al. 2022, Deduplicating Training Data Makes Language Models Better, use a suffix array of the
whole corpus. Here each window of N words is hashed, the first document that stays with a hash keeps its
window, and in later documents repeated windows that touch or overlap are merged into a span. A document
that would be too short without its spans goes, and keeps no window.
"""

from __future__ import annotations

import numpy as np

from minillm_core.documents import Progress
from minillm_data.columns import Column
from minillm_data.words import PRINTED

_LOAD = 1 << 22
"""Approximate number of windows compared with each other at a time: some 200 MiB."""

_BLOCK = 1 << 20


def repeated(
    hashes: Column,
    counts: np.ndarray,
    kept: np.ndarray,
    width: int,
    least: int,
    links: Column,
    progress: Progress | None = None,
) -> np.ndarray:
    """Find the spans of each document that are also in an earlier document that stays.

    Memory: 24 bytes per document, 200 more for one with spans, 32 per span, and some 300 MiB.

    Args:
        hashes: hashes of all windows of all documents, in order, uint64.
        counts: windows of each document, int64 (documents,).
        kept: bool (documents,); False: the document is ignored, as a source and as a target.
        width: words of a window.
        least: words that a document needs to stay without its spans.
        links: an empty column of int64, used as scratch space.
        progress: called with the bytes of hashes read, and the total.

    Returns:
        int64 (spans, 4), in order: the document, the span's first word, its end (exclusive), and the
        first document that stays and contains the span's first window.
    """
    ends = np.cumsum(counts)
    starts = ends - counts
    parts = hashes.length // _LOAD + 1
    for start in range(0, hashes.length, _BLOCK):
        links.append(np.full(min(_BLOCK, hashes.length - start), -1))
    for part in range(parts):
        places, values = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
        for start in range(0, hashes.length, _BLOCK):
            if progress:
                done = part * hashes.length + start
                progress("looking for repeated spans", 8 * done, 8 * parts * hashes.length)
            block = hashes.read(start, min(start + _BLOCK, hashes.length))
            here = np.flatnonzero((block >> np.uint64(32)) % np.uint64(parts) == part)
            here = here[kept[np.searchsorted(ends, start + here, side="right")]]
            places.append(start + here)
            values.append(block[here])
        place, first = _linked(np.concatenate(places), np.concatenate(values))
        for start in range(0, hashes.length, _BLOCK):
            low, high = np.searchsorted(place, [start, start + _BLOCK])
            if high > low:
                block = links.read(start, min(start + _BLOCK, hashes.length))
                block[place[low:high] - start] = first[low:high]
                links.put(start, block)
    found, link = [np.zeros((0, 4), np.int64)], links.mapped("r+")[:, 0]
    for document in np.flatnonzero(kept & (counts > 0)).tolist():
        own = link[starts[document] : ends[document]]
        here = np.flatnonzero(own >= 0)
        if not len(here):
            continue
        holder = -2 - link[own[here]]  # negative: none
        first, by = here[holder >= 0], holder[holder >= 0]
        spans = _merged(np.stack([np.full_like(first, document), first, first + width, by], axis=1))
        left = counts[document] + width - 1 - (spans[:, 2] - spans[:, 1]).sum()
        if len(spans):
            found.append(spans)
        if not len(spans) or left >= least:
            link[own[here[holder < 0]]] = -2 - document
    return np.concatenate(found)


def _linked(places: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions, in order, whose value occurs several times, and the first with each one's value.

    The first one's own entry later becomes -2 - the document that keeps the window, once one does.
    """
    order = np.argsort(values, kind="stable")
    new = np.ones(len(order), bool)
    new[1:] = np.diff(values[order]) != 0
    first = np.empty(len(order), np.int64)
    first[order] = places[order[np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))]]
    linked = np.sort(order[~(new & np.append(new[1:], True))])
    return places[linked], first[linked]


def _merged(spans: np.ndarray) -> np.ndarray:
    """Merge spans of a document that touch or overlap, given in order."""
    if not len(spans):
        return spans
    new = np.ones(len(spans), bool)
    new[1:] = (spans[1:, 0] != spans[:-1, 0]) | (spans[1:, 1] > spans[:-1, 2])
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(spans)) - 1
    found = spans[first]
    found[:, 2] = spans[last, 2]
    return found


def cut(text: str, spans: np.ndarray) -> tuple[str, list[str]]:
    """Cut spans of words out of a text; the text between them is unchanged.

    Args:
        text: the document's text.
        spans: int64 (spans, 2): first word and end (exclusive); in order, disjoint.

    Returns:
        The remaining text, and the removed texts.
    """
    words = [found.span() for found in PRINTED.finditer(text)]
    left, out, place = [], [], 0
    for first, end in spans.tolist():
        start, stop = words[first][0], words[end - 1][1]
        left.append(text[place:start])
        out.append(text[start:stop])
        place = stop
    left.append(text[place:])
    return "".join(left), out
