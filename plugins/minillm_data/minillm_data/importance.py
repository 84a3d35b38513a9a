"""Data selection by importance resampling (DSIR): pick documents that resemble a target.

Xie et al. 2023 (DSIR, arXiv:2302.03169): words and bigrams are hashed into buckets; the target, and
all sources together, each define a distribution over them; a document's log importance weight is the
log ratio of its probabilities under the two. Sampling without replacement in proportion to the
weights is done by adding Gumbel noise to the log weights and taking the highest.

The paper's documents have similar lengths. Here lengths vary, and the sum over a whole book would
always be far above or below the sum over a page. A document's weight is therefore normalised to an
average stretch of :data:`WORDS` words.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from minillm_core import DataError
from minillm_core.documents import Progress
from minillm_data.files import Malformed
from minillm_data.output import Output, key_of
from minillm_data.report import page
from minillm_data.rows import Rows, text_of
from minillm_lab.page import section, table

if TYPE_CHECKING:
    from minillm_data.mix import Input, Measure

BUCKETS = 10_000
"""Hash buckets of words and bigrams, as in the paper."""

WORDS = 128
"""Number of words that a document's weight is normalised to."""

_WORD = re.compile(r"\w+|[^\w\s]+")
_FLOOR = 1e-8  # added to probabilities, as in the paper's code
_CACHED = 1 << 20  # maximum number of cached word hashes
_WEIGHTS, _SIZES = "weights.npy", "sizes.npy"
_NO_TEXT = (
    "the document holds token ids, and --like compares text",
    "give the text that they were made from",
)


class Hashed:
    """A hasher of words and bigrams, with a cache of word hashes."""

    def __init__(self) -> None:
        self._hashes: dict[str, int] = {}

    def buckets(self, text: str) -> np.ndarray:
        """Return the bucket of each word, then of each bigram, int64 (2 n - 1,)."""
        if len(self._hashes) > _CACHED:
            self._hashes.clear()
        hashes, found = self._hashes, []
        for word in _WORD.findall(text.lower()):
            if (value := hashes.get(word)) is None:
                value = hashes[word] = crc32(word.encode("utf-8"))
            found.append(value)
        words = np.array(found, np.uint64)
        pairs = words[:-1] * np.uint64(0x9E3779B97F4A7C15) + words[1:]
        pairs = (pairs ^ (pairs >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93) >> np.uint64(16)
        return (np.concatenate([words, pairs]) % np.uint64(BUCKETS)).astype(np.int64)

    def counts(self, rows: Rows, what: str, progress: Progress | None) -> np.ndarray:
        """Count the words and bigrams of all rows per bucket, int64 (BUCKETS,).

        Raises:
            DataError: a row holds ids, or there is no text.
        """
        total = np.zeros(BUCKETS, np.int64)
        for row in rows.read(what, progress):
            total += np.bincount(self.buckets(text_of(row, *_NO_TEXT)), minlength=BUCKETS)
        if not total.any():
            raise DataError("there is no text", where=str(rows.paths[0]), fix="name other files")
        return total


def log_ratio(target: np.ndarray, sources: np.ndarray) -> np.ndarray:
    """Compute the log ratio of two distributions from bucket counts: float64 (BUCKETS,)."""
    p, q = target / target.sum(), sources / sources.sum()
    return np.log(p + _FLOOR) - np.log(q + _FLOOR)


def log_weight(ratio: np.ndarray, buckets: np.ndarray) -> float:
    """Compute a document's log importance weight, normalised to WORDS words."""
    return float(ratio[buckets].mean() * (2 * WORDS - 1)) if len(buckets) else float("-inf")


def resample(log_weights: np.ndarray, sizes: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Sample documents without replacement, in proportion to their weights (Gumbel top-k).

    Args:
        log_weights: float64 (documents,).
        sizes: int64 (documents,).
        size: maximum total size; the first document that does not fit ends the sampling.
        seed: seed of the sampling.

    Returns:
        bool (documents,): which documents are drawn.
    """
    noise = np.random.default_rng(seed).gumbel(size=len(log_weights))
    order = np.argsort(-(log_weights + noise), kind="stable")
    drawn = np.zeros(len(order), bool)
    drawn[order[np.cumsum(sizes[order]) <= size]] = True
    return drawn


def pick(
    inputs: Sequence[Input],
    sources: Sequence[Rows],
    target: Rows,
    to: Path,
    size: int,
    measure: Measure,
    seed: int,
    malformed: Malformed,
    say: Callable[[str], None],
    progress: Progress | None,
) -> dict[str, Any]:
    """Select documents of the sources that resemble the target; write them in the order of the sources.

    Args:
        inputs: the sources' paths.
        sources: the sources' rows.
        target: rows of the target distribution.
        to: the folder to write.
        size: maximum total size of the selection.
        measure: measures documents.
        seed: seed of the sampling.
        malformed: handling of documents that cannot be read.
        say: prints a line.
        progress: called with the bytes read.

    Returns:
        The report.

    Raises:
        DataError: a document holds ids, or the first one drawn exceeds the size.
    """
    asked = {
        "like": [str(path) for path in target.paths],
        "size": size,
        "unit": measure.unit,
        "tokenizer": None if measure.tokenizer is None else str(measure.tokenizer),
        "seed": seed,
    }
    every = [source for rows in (*sources, target) for source in rows.sources]
    groups = [len(rows.sources) for rows in sources]
    key = key_of("mix", every, **asked, by=measure.digest, groups=groups, malformed=malformed)
    with Output(to, key, own=(_WEIGHTS, _SIZES)) as output:
        if output.note:
            say(output.note)
        state = output.state
        if "documents" not in state.more:
            weights, sizes, documents = _weigh(sources, target, measure, progress)
            for name, values in ((_WEIGHTS, weights), (_SIZES, sizes)):
                output.save_array(name, values)
            state.more |= {"documents": documents, "written": [0] * len(sources)}
            output.close_part()
        weights, sizes = map(output.load_array, (_WEIGHTS, _SIZES))
        drawn = resample(weights, sizes, size, seed)
        if not drawn.any():
            raise DataError(
                f"the document that was drawn first has more than {size:,} {measure.unit}",
                where="--size",
                fix="a larger size, or another --seed",
            )
        documents, written = state.more["documents"], state.more["written"]
        begins = np.cumsum([0, *documents])
        disk, before = sum(rows.size for rows in sources), 0
        for index, rows in enumerate(sources):
            begin, end = int(begins[index]), int(begins[index + 1])
            if state.rows < end:
                skip = max(0, state.rows - begin)
                reading = rows.read("picking", _shifted(progress, before, disk))
                for number, row in enumerate(islice(reading, skip, None), begin + skip):
                    if drawn[number]:
                        output.write(row.line)
                        written[index] += int(sizes[number])
                    output.dealt_with()
            before += rows.size
        report = {
            "command": "mix",
            **asked,
            "documents": int(drawn.sum()),
            "total": sum(written),
            "sources": [
                {
                    "path": one.path,
                    "documents": documents[index],
                    "picked": int(drawn[begins[index] : begins[index + 1]].sum()),
                    "written": written[index],
                    "log_weight": _mean(weights[begins[index] : begins[index + 1]]),
                }
                for index, one in enumerate(inputs)
            ],
            "log_weight": {"all": _mean(weights), "picked": _mean(weights[drawn])},
            "left_out": dict(sorted(sum((rows.notes for rows in sources), Counter()).items())),
        }
        output.finish(report, _page(report))
    return report


def _weigh(
    sources: Sequence[Rows], target: Rows, measure: Measure, progress: Progress | None
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Compute every document's log weight, float64, and size, int64; count the documents of each source."""
    hashed = Hashed()
    wanted = hashed.counts(target, "counting the target's words", progress)
    here = np.zeros(BUCKETS, np.int64)
    for rows in sources:
        here += hashed.counts(rows, f"counting the words of {rows.paths[0]}", progress)
    ratio = log_ratio(wanted, here)
    weights, sizes, documents = array("d"), array("q"), []
    for rows in sources:
        before = len(weights)
        reading = rows.read(f"weighing {rows.paths[0]}", progress)
        for row, size in measure.sized(reading):
            weights.append(log_weight(ratio, hashed.buckets(text_of(row, *_NO_TEXT))))
            sizes.append(size)
        documents.append(len(weights) - before)
    return np.array(weights), np.array(sizes), documents


def _shifted(progress: Progress | None, before: int, total: int) -> Progress | None:
    """Wrap a progress callback: offset a source's bytes by those of the sources before it."""
    if progress is None:
        return None
    return lambda what, done, _: progress(what, before + done, total)


def _mean(log_weights: np.ndarray) -> float | None:
    finite = log_weights[np.isfinite(log_weights)]
    return round(float(finite.mean()), 3) if len(finite) else None


def _page(report: Mapping[str, Any]) -> str:
    unit, means = report["unit"], report["log_weight"]
    rows = (
        (
            one["path"],
            f"{one['documents']:,}",
            f"{one['picked']:,}",
            f"{one['written']:,}",
            "" if one["log_weight"] is None else f"{one['log_weight']:.2f}",
        )
        for one in report["sources"]
    )
    head = ["source", ">documents", ">picked", f">{unit} picked", ">mean log weight"]
    about = {
        "like": ", ".join(report["like"]),
        f"{unit}, at most": f"{report['size']:,}",
        f"{unit} picked": f"{report['total']:,}",
        "tokenizer": report["tokenizer"],
        "seed": report["seed"],
        "mean log weight of all": means["all"],
        "mean log weight of what was picked": means["picked"],
        "from": "Xie et al. 2023, Data Selection for Language Models via Importance Resampling",
    }
    counts = {f"from {one['path']}": one["picked"] for one in report["sources"]}
    everything = sum(one["documents"] for one in report["sources"])
    counts["not picked"] = everything - report["documents"]
    title = "Documents that resemble a target"
    return page(title, about, counts, {}, section("Sources", table(head, rows)))
