"""Deduplication: exact duplicates, near duplicates (MinHash), and repeated spans of words."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from minillm_core import DataError, Refusal
from minillm_core.commands import pip_line
from minillm_core.documents import Progress
from minillm_data.columns import Column
from minillm_data.files import Malformed
from minillm_data.groups import equal, jaccard, similar
from minillm_data.output import Output, check_outside, key_of
from minillm_data.report import EXAMPLES, Examples, page
from minillm_data.rows import Row, Rows, json_line
from minillm_data.signatures import PERMUTATIONS, Content, Rules, sign
from minillm_data.spans import cut, repeated
from minillm_data.workers import cores, in_order
from minillm_lab.page import pairs

OUTCOMES = KEPT, CUT, EXACT, NEAR, SHORT = (
    "kept",
    "kept, spans cut out",
    "exact duplicate",
    "near duplicate",
    "too short without its spans",
)
"""The outcomes of a document."""

_NUMBER = {outcome: number for number, outcome in enumerate(OUTCOMES)}

_BATCH = 1 << 18  # characters sent to a process at a time
_NOTED = 32 << 20  # characters between progress records of the first pass
_SMALL = 4 << 20  # bytes of input too few for another process
_DECISIONS, _SPANS, _LINKS = "decisions.npy", "spans.npy", "links.bin"


def dedup(
    paths: Sequence[str | Path],
    to: str | Path,
    *,
    near: bool = True,
    threshold: float | None = None,
    shingle: int | None = None,
    spans: int | None = None,
    min_words: int | None = None,
    malformed: Malformed = "strict",
    processes: int | None = None,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the documents that are not duplicates of earlier ones, in their order, line by line.

    Whole documents are equal where the bytes of their text are (xxh3-128), the messages and tools of
    their chats, or their ids. Near duplicates are documents whose sets of shingles have a Jaccard similarity
    of the threshold or more: candidates by MinHash (Broder 1997, On the resemblance and containment of
    documents), then compared exactly. A shingle is a run of four words; a word is a run of letters,
    digits and underscores in lower case, or one character of a script that is written without spaces,
    or an id. Near duplicates of near duplicates are in one group, and the first document of each group
    is kept.

    With ``spans=N``, every run of N words contained in an earlier document that is written is then
    removed, comparing exact bytes: words are separated by white space. The remaining text is joined
    unchanged. A document that loses words and has fewer than ``min_words`` left is dropped. (After Lee
    et al. 2022, Deduplicating Training Data Makes Language Models Better, with hashes of windows
    instead of a suffix array.)

    The files are read twice. Temporary files in the unfinished folder take 8 bytes per word, 512 per
    document (memory-mapped while they are compared), and 16 more per word with spans. Memory is 100
    bytes per document and some 100 MiB per process, with spans 300 MiB more. In a script, call this
    under ``if __name__ == "__main__"``, since it starts processes.

    Args:
        paths: files or folders.
        to: the folder to write.
        near: look for near duplicates.
        threshold: default 0.8.
        shingle: words of a shingle; default 4.
        spans: words, at least 2; None: no spans are cut out.
        min_words: default: as many as ``spans``.
        malformed: handling of documents that cannot be read.
        processes: number of processes; default: one per core, or only this one for small files.
        say: prints a line.
        progress: called with the name of the work, the bytes done and the total.

    Returns:
        The contents of report.json.

    Raises:
        ConfigError: a value is out of range, or an option has no effect.
        Refusal: rensa, which computes the signatures, is not installed.
        DataError: a document cannot be read, or the folder cannot be written.
        MinillmError: a process ended, for example out of memory.
    """
    rules = Rules.of(near, threshold, shingle, spans, min_words)
    version = _version_of_minhash() if near else None
    check_outside(Path(to), paths)
    rows = Rows(paths, malformed, say)
    key = key_of("dedup", rows.sources, rules=vars(rules), malformed=malformed, minhash=version)
    if processes is None:
        processes = cores() if rows.size > _SMALL else 1
    with (
        Output(Path(to), key, own=Work.files) as output,
        Work(output, rows, rules, progress) as work,
    ):
        if output.resumed:
            say(f"continues the work that was done before, in {output.folder}")
        return work.finish(processes)


def _version_of_minhash() -> str:
    """Return the version of the MinHash algorithm, which determines the signatures' values.

    Raises:
        Refusal: rensa is not installed.
    """
    try:
        from rensa import RMinHash  # type: ignore[attr-defined]
    except ModuleNotFoundError as error:
        raise Refusal(
            "near duplicates are found by rensa, which is not installed",
            where=sys.executable,
            fix=f"{pip_line('minillm-data[dedup]')}; or --no-near for exact duplicates alone",
        ) from error
    return f"rensa RMinHash {RMinHash.ALGORITHM_VERSION}"


class Work(ExitStack):
    """The three phases of deduplication (sign, decide, write), and their files in the unfinished folder.

    Each phase records its completion; the first also records its progress, and the last writes parts.
    """

    columns = ("digests", "counts", "shingles", "signatures", "windows")
    files = (*(f"{name}.bin" for name in columns), _LINKS, _DECISIONS, _SPANS)

    def __init__(self, output: Output, rows: Rows, rules: Rules, progress: Progress | None) -> None:
        super().__init__()
        self._output, self._rows, self._rules, self._progress = output, rows, rules, progress
        self._more = output.state.more
        lengths: dict[str, int] = self._more.setdefault("lengths", {})

        def column(name: str, dtype: type[np.generic], width: int = 1) -> Column:
            path = output.folder / f"{name}.bin"
            with output.writing():
                return self.enter_context(Column(path, dtype, width, lengths.get(name, 0)))

        self._digests = column("digests", np.uint64, 2)
        self._counts = column("counts", np.int64, 2)
        self._shingles = column("shingles", np.uint64)
        self._signatures = column("signatures", np.uint32, PERMUTATIONS)
        self._windows = column("windows", np.uint64)

    def finish(self, processes: int) -> dict[str, Any]:
        """Run the remaining phases; return the report."""
        if not self._more.get("signed"):
            self._sign(processes)
        if not self._more.get("decided"):
            with self._output.writing():
                self._decide()
        return self._write()

    def _sign(self, processes: int) -> None:
        """Read every document, and store its digests, shingles and signatures."""
        unread = islice(self._rows.read("reading", self._progress), self._digests.length, None)
        batches = _batches(_content(row, self._rules) for row in unread)
        columns = (self._digests, self._counts, self._shingles, self._signatures, self._windows)
        size = 0
        with closing(in_order(partial(sign, self._rules), batches, processes)) as done:
            for signed in done:
                with self._output.writing():
                    for column, records in zip(columns, signed, strict=True):
                        column.append(records)
                        size += records.nbytes
                if size >= _NOTED:
                    self._note(columns)
                    size = 0
        self._note(columns)
        self._more["signed"] = True
        self._output.close_part()

    def _note(self, columns: Sequence[Column]) -> None:
        """Record the lengths of the columns, once they are on disk."""
        with self._output.writing():
            for column in columns:
                column.sync()
        lengths = (column.length for column in columns)
        self._more["lengths"] = dict(zip(self.columns, lengths, strict=True))
        self._output.close_part()

    def _decide(self) -> None:
        """Determine each document's outcome, the document it duplicates, and the spans to cut."""
        rules, counts = self._rules, self._counts.read()
        first = equal(self._digests.read())
        documents = np.arange(len(first))
        outcomes = np.where(first == documents, _NUMBER[KEPT], _NUMBER[EXACT])
        if rules.threshold is not None:
            among = documents[(first == documents) & (counts[:, 0] > 0)]
            signatures = self._signatures.mapped()
            group = similar(signatures, among, rules.threshold, self._set(counts), self._progress)
            outcomes[group != documents] = _NUMBER[NEAR]
            first = group[first]
        if rules.spans is not None:
            kept = first == documents
            width, least = rules.spans, rules.min_words
            with Column(self._output.folder / _LINKS, np.int64) as links:
                spans = repeated(
                    self._windows, counts[:, 1], kept, width, least, links, self._progress
                )
            words = np.where(counts[:, 1] > 0, counts[:, 1] + rules.spans - 1, 0)
            np.subtract.at(words, spans[:, 0], spans[:, 2] - spans[:, 1])
            has = np.unique(spans[:, 0])
            short = words[has] < rules.min_words
            outcomes[has] = np.where(short, _NUMBER[SHORT], _NUMBER[CUT])
            self._output.save_array(_SPANS, spans)
        self._output.save_array(_DECISIONS, np.stack([first, outcomes], axis=1))
        self._more["decided"] = True
        self._output.close_part()

    def _set(self, counts: np.ndarray) -> Callable[[int], np.ndarray]:
        """Return a function that reads a document's shingles."""
        ends = np.cumsum(counts[:, 0])

        def read(document: int) -> np.ndarray:
            end = int(ends[document])
            return self._shingles.read(end - int(counts[document, 0]), end)

        return read

    def _write(self) -> dict[str, Any]:
        """Write the kept documents and the report."""
        output, more = self._output, self._more
        decisions = output.load_array(_DECISIONS)
        first, outcomes = decisions.T
        spans = np.zeros((0, 4), np.int64)
        if self._rules.spans is not None:
            spans = output.load_array(_SPANS)
        examples = Examples(more.get("examples"))
        lost: dict[str, int] = more.setdefault("cut", {"spans": 0, "words": 0, "characters": 0})
        places: dict[str, str] = more.setdefault("places", {})  # JSON allows no other keys
        more["examples"], wanted = examples.found, _originals(first, outcomes, spans)
        sets = self._set(self._counts.read())
        rows = islice(self._rows.read("writing", self._progress), output.state.rows, None)
        for number, row in enumerate(rows, output.state.rows):
            if number == len(first):  # a file grew after the first pass
                break
            if number in wanted:
                places[str(number)] = row.where
            outcome, original = OUTCOMES[outcomes[number]], int(first[number])
            where, shown, line = row.where, _beginning(row), row.line
            if outcome == EXACT:
                where = f"{where}: the same as {places.get(str(original))}"
            elif outcome == NEAR and len(examples.found.get(NEAR, ())) < EXAMPLES:
                alike = jaccard(sets(number), sets(original))
                where = f"{where}: Jaccard similarity {alike:.2f} with {places[str(original)]}"
            elif outcome in (CUT, SHORT):
                low, high = np.searchsorted(spans[:, 0], [number, number + 1])
                text, out = cut(row.record["text"], spans[low:high, 1:3])
                lost["spans"] += len(out)
                lost["words"] += int((spans[low:high, 2] - spans[low:high, 1]).sum())
                lost["characters"] += sum(map(len, out))
                where = f"{where}: cut out, as it is in {places.get(str(spans[low, 3]))}"
                shown = out[0]
                line = json_line({**row.record, "text": text})
            output.state.counts[outcome] += 1
            if outcome != KEPT:
                examples.add(outcome, where, shown)
            if outcome in (KEPT, CUT):
                output.write(line)
            output.dealt_with()
        for source in self._rows.sources:
            source.check_unchanged()
        report = self._report(first, examples)
        output.finish(report, _page(report))
        return report

    def _report(self, first: np.ndarray, examples: Examples) -> dict[str, Any]:
        state, documents = self._output.state, len(first)
        duplicates = state.counts[EXACT] + state.counts[NEAR]
        alike = int((np.bincount(first)[first] > 1).sum()) if documents else 0
        return {
            "command": "dedup",
            "files": [str(source.path) for source in self._rows.sources],
            "settings": vars(self._rules),
            "documents": documents,
            "counts": {name: count for name, count in state.counts.items() if count},
            "with_a_duplicate": alike,
            "share_with_a_duplicate": alike / max(1, documents),
            "share_duplicates_dropped": duplicates / max(1, documents),
            "cut": state.more["cut"] if self._rules.spans is not None else None,
            "notes": dict(self._rows.notes),
            "parts": state.parts,
            "examples": examples.found,
        }


def _content(row: Row, rules: Rules) -> Content:
    """Return a row's content for comparison.

    Raises:
        DataError: spans are to be cut from a row that is not text.
    """
    if row.text is not None and row.messages is None:
        return Content(row.text)
    if rules.spans is not None:
        raise DataError(
            "--spans cuts words out of texts, and this is a chat or a list of ids",
            where=row.where,
            fix="take --spans away, or give the texts alone",
        )
    if row.text is None:
        return Content(row.record["ids"])
    whole = [row.messages, row.record.get("tools")]
    return Content(row.text, json.dumps(whole, sort_keys=True, default=str))


def _batches(contents: Iterable[Content]) -> Iterator[list[Content]]:
    batch, size = [], 0
    for content in contents:
        batch.append(content)
        size += len(content.words)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _originals(first: np.ndarray, outcomes: np.ndarray, spans: np.ndarray) -> set[int]:
    """Return the documents whose locations the examples name."""
    found: set[int] = set()
    for outcome in (EXACT, NEAR):
        found.update(first[np.flatnonzero(outcomes == _NUMBER[outcome])[:EXAMPLES]].tolist())
    for outcome in (CUT, SHORT):
        shown = np.flatnonzero(outcomes == _NUMBER[outcome])[:EXAMPLES]
        found.update(spans[np.searchsorted(spans[:, 0], shown), 3].tolist())
    return found


def _beginning(row: Row) -> str:
    return row.text if row.text is not None else str(row.record["ids"][:100])


def _page(report: Mapping[str, Any]) -> str:
    about = {
        "files": ", ".join(report["files"]),
        "settings": pairs(report["settings"]),
        "documents with a duplicate": (
            f"{report['with_a_duplicate']:,} ({100 * report['share_with_a_duplicate']:.2f} %)"
        ),
        "cut out": pairs(report["cut"]) if report["cut"] else None,
        "not read": pairs(report["notes"]),
    }
    return page("Deduplication", about, report["counts"], report["examples"])
