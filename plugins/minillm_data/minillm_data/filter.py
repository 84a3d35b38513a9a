"""Filter documents: by language, by published rules, and by bits per byte under a checkpoint."""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from minillm_core import ConfigError, DataError
from minillm_core.commands import plain
from minillm_core.documents import Progress, grouped
from minillm_data.bits import Bits, checkpoint_of
from minillm_data.files import Malformed
from minillm_data.judging import PROBABILITY, Verdict, judge, language_rule
from minillm_data.output import Output, check_outside, key_of
from minillm_data.report import Examples, page
from minillm_data.rows import Row, Rows, text_of
from minillm_data.rules import NONE, SETS, RuleSet, select
from minillm_data.workers import cores, in_order
from minillm_lab.page import section, table

DEFAULT = "gopher,fineweb"
"""The rules that apply by default."""

_NO_TEXT = (
    "the document holds ids, and rules read text",
    "give the text that they were made from, or --malformed skip to count and drop them",
)
_SMALL = 16 << 20  # bytes of unpacked files below which no processes are started
_BATCH = 1 << 18  # bytes of lines sent to a process at a time


def filter_rows(
    paths: Sequence[str | Path],
    to: str | Path,
    *,
    rules: str | None = None,
    languages: Sequence[str] = (),
    language_probability: float | None = None,
    model: str | Path | None = None,
    min_bits: float | None = None,
    max_bits: float | None = None,
    malformed: Malformed = "strict",
    processes: int | None = None,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the documents that pass every filter, byte for byte unless a rule edits lines.

    Language identification runs first, then the rules in the given order, then the model. A
    dropped document is counted under the first reason. After a kill the same call resumes.
    In a script, call this under ``if __name__ == "__main__"``, since it starts processes.

    Args:
        paths: files or folders of text or JSON lines.
        to: the folder to write, which must not exist.
        rules: names, see :func:`minillm_data.rules.select`; default: DEFAULT.
        languages: codes that py3langid supports ("en"); a document's most likely language must be
            among them. Empty: no language identification.
        language_probability: minimum probability of that language, 0 to 1; default: PROBABILITY.
        model: a run's folder, for bits per byte over the first tokens of each document
            (:data:`minillm_data.bits.TOKENS`).
        min_bits: minimum bits per byte under the model; repetitive text has few.
        max_bits: maximum bits per byte under the model; garbled text has many.
        malformed: handling of documents that cannot be read, or hold ids instead of text.
        processes: number of processes that apply the rules; default: one per core, or only this one
            for small files and when a model takes most of the time.
        say: prints a line.
        progress: called with the bytes read.

    Returns:
        The report, as in report.json: ``counts`` (documents) and ``bytes`` (of their input lines)
        by outcome, ``lines`` removed or changed by rule, ``examples`` and more.

    Raises:
        ConfigError: an option is invalid, or has no effect.
        Refusal: py3langid is not installed, or the folder holds no run.
        DataError: a document cannot be read, or the folder cannot be written.
    """
    rules = DEFAULT if rules is None else rules
    sets = select(rules)
    _check(sets, languages, language_probability, model, min_bits, max_bits, malformed)
    check_outside(Path(to), paths)
    least = PROBABILITY if language_probability is None else language_probability
    if languages:
        language_rule(languages, least)  # raises early for invalid codes
    asked = {
        "rules": {name: rule_set.names for name, rule_set in sets.items()},
        "languages": [*languages],
        "language_probability": least if languages else None,
        "model": None if model is None else checkpoint_of(model),
        "min_bits": min_bits,
        "max_bits": max_bits,
    }
    source = Rows(paths, malformed, say)
    if processes is None:
        small = sum(one.unpacked for one in source.sources) < _SMALL
        processes = 1 if small or model is not None else cores()
    key = key_of("filter", source.sources, **asked, malformed=malformed)
    with Output(Path(to), key) as output:
        if output.note:
            say(output.note)
        state = output.state
        examples = Examples(state.more.get("examples"))
        lines, sizes = (Counter[str](state.more.get(name, {})) for name in ("lines", "bytes"))
        state.more |= {"examples": examples.found, "lines": lines, "bytes": sizes}
        state.more.setdefault("written", 0)
        rows = islice(source.read("filtering", progress), state.rows, None)
        with ExitStack() as stack:
            edited_by = next((name for name, found in sets.items() if found.lines), None)
            ask = partial(judge, rules, tuple(languages), least)
            judged = _judged(ask, _checked(rows, malformed, edited_by), processes)
            judged = stack.enter_context(closing(judged))
            if model is not None:
                bits = stack.enter_context(Bits(model))
                judged = measured(judged, bits, partial(bits_reason, min_bits, max_bits))
            for row, verdict in judged:
                reason, text = verdict.reason, verdict.text or row.text or ""
                for name, line in verdict.edits:
                    lines[name] += 1
                    examples.add(f"{name} (a line)", row.where, line)
                if reason is None:
                    kept = row.line if verdict.text is None else edited(row, text)
                    output.write(kept)
                    state.more["written"] += len(kept)
                else:
                    examples.add(reason, row.where, row.text or plain(row.line.decode()))
                state.counts[reason or "kept"] += 1
                sizes[reason or "kept"] += len(row.line)
                output.dealt_with()
        report = {
            "command": "filter",
            "paths": [str(path) for path in paths],
            **asked,
            "documents": state.counts.total(),
            "kept": state.counts["kept"],
            "counts": dict(sorted(state.counts.items())),
            "lines": dict(sorted(lines.items())),
            "left_out": dict(sorted(source.notes.items())),
            "bytes": dict(sorted(sizes.items())),
            "bytes_written": state.more["written"],
            "examples": dict(sorted(examples.found.items())),
        }
        output.finish(report, _page(report))
    return report


def _judged(
    ask: Callable[[list[str | None]], list[Verdict]], rows: Iterable[Row], processes: int
) -> Generator[tuple[Row, Verdict]]:
    """Yield rows with their verdicts, in order."""
    ahead: deque[list[Row]] = deque()

    def texts() -> Iterator[list[str | None]]:
        for batch in grouped(rows, lambda row: len(row.line), _BATCH):
            ahead.append(batch)
            yield [row.text for row in batch]

    with closing(in_order(ask, texts(), processes)) as done:
        for verdicts in done:
            yield from zip(ahead.popleft(), verdicts, strict=True)


def _checked(rows: Iterable[Row], malformed: Malformed, edited_by: str | None) -> Iterator[Row]:
    """Yield rows, checking that the filters support them.

    Raises:
        DataError: a row holds ids where ``malformed`` is strict, or is a chat whose lines the rule
            set ``edited_by`` would edit.
    """
    for row in rows:
        if malformed == "strict":
            text_of(row, *_NO_TEXT)
        if edited_by and row.messages is not None:
            raise DataError(
                f"{edited_by} removes lines, and a chat's messages are not edited",
                where=row.where,
                fix=f"leave {edited_by} out of --rules for chats",
            )
        yield row


def edited(row: Row, text: str) -> bytes:
    """Return a row's line with its text replaced; the rest of the line stays byte for byte."""
    line = row.line.decode("utf-8")
    begin, end = _place_of_text(line)
    return f"{line[:begin]}{json.dumps(text, ensure_ascii=False)}{line[end:]}".encode()


def _place_of_text(line: str) -> tuple[int, int]:
    """Find the start and end of the value of "text" in a JSON object that has one."""
    read, at = json.JSONDecoder().raw_decode, line.index("{")
    while True:
        key, at = read(line, _behind_space(line, at + 1))
        begin = _behind_space(line, line.index(":", at) + 1)
        _, at = read(line, begin)
        if key == "text":
            return begin, at
        at = line.index(",", at)


def _behind_space(line: str, at: int) -> int:
    while line[at] in " \t\r\n":
        at += 1
    return at


def measured(
    judged: Iterable[tuple[Row, Verdict]],
    bits: Callable[[Sequence[str]], Sequence[float]],
    reason: Callable[[float], str | None],
) -> Iterator[tuple[Row, Verdict]]:
    """Filter the remaining documents by bits per byte under a checkpoint, in batches and in order.

    Args:
        judged: rows with their verdicts so far.
        bits: texts -> bits per byte.
        reason: bits per byte -> the reason for dropping a document, or None.
    """
    for group in grouped(judged, lambda one: len(one[0].line), _BATCH):
        asked = [one for one in group if one[1].reason is None]
        found = iter(bits([verdict.text or row.text or "" for row, verdict in asked]))
        for row, verdict in group:
            if verdict.reason is None:
                verdict = replace(verdict, reason=reason(next(found)))
            yield row, verdict


def bits_reason(least: float | None, most: float | None, found: float) -> str | None:
    """Return the reason for dropping a document by its bits per byte; None: kept."""
    if least is not None and found < least:
        return f"bits: fewer than {least:g} bits per byte"
    if most is not None and found > most:
        return f"bits: more than {most:g} bits per byte"
    return None


def _check(
    sets: Mapping[str, RuleSet],
    languages: Sequence[str],
    probability: float | None,
    model: str | Path | None,
    least: float | None,
    most: float | None,
    malformed: Malformed,
) -> None:
    bounded = least is not None or most is not None
    if probability is not None and not languages:
        raise ConfigError(
            "--language-probability has no effect without --language",
            where="--language-probability",
            fix="add --language en",
        )
    if probability is not None and not 0 <= probability <= 1:
        raise ConfigError(
            f"{probability:g} is not a probability", where="--language-probability", fix="0 to 1"
        )
    if bounded and model is None:
        raise ConfigError(
            "bounds of bits per byte have no effect without a model",
            where="--min-bits, --max-bits",
            fix="add --model RUN",
        )
    if model is not None and not bounded:
        raise ConfigError(
            "a model without bounds has no effect",
            where="--model",
            fix="add --max-bits X, --min-bits X or both",
        )
    if not all(0 <= bound < math.inf for bound in (least, most) if bound is not None):
        raise ConfigError(
            "a bound that is not a number of bits",
            where="--min-bits, --max-bits",
            fix="a number from 0 on, such as 2.5",
        )
    if least is not None and most is not None and least > most:
        raise ConfigError(
            f"no document has at least {least:g} bits per byte and at most {most:g}",
            where="--min-bits, --max-bits",
            fix="the smaller one is --min-bits",
        )
    if not (sets or languages or model or malformed == "skip"):
        raise ConfigError(
            "no filter is named",
            where=f"--rules {NONE}",
            fix="name rules, or add --language, --model, or --malformed skip, which leaves out documents "
            "that cannot be read",
        )


def _page(report: Mapping[str, Any]) -> str:
    sets = report["rules"]
    about = {
        "files": ", ".join(report["paths"]),
        "languages": ", ".join(report["languages"]),
        "rules": "; ".join(f"{name}: {', '.join(names)}" for name, names in sets.items()),
        "papers": "; ".join(SETS[name].paper for name in sets),
        "checkpoint": report["model"],
        "bits per byte, least": report["min_bits"],
        "bits per byte, most": report["max_bits"],
        "bytes read": f"{sum(report['bytes'].values()):,}",
        "bytes written": f"{report['bytes_written']:,}",
    }
    more: list[object] = []
    if report["lines"]:
        rows = ((name, f"{count:,}") for name, count in report["lines"].items())
        more.append(section("Lines", table(["removed or changed by", ">lines"], rows)))
    if report["left_out"]:
        rows = ((name, f"{count:,}") for name, count in report["left_out"].items())
        more.append(section("Not read", table(["what", ">times"], rows)))
    counts, examples = report["counts"], report["examples"]
    return page("Filtered documents", about, counts, examples, *more, sizes=report["bytes"])
