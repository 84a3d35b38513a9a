"""Filter documents: by language, by published rules, and by bits per byte under a checkpoint."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from minillm_core import ConfigError, DataError, Refusal
from minillm_core.commands import pip_line, plain
from minillm_core.documents import Progress
from minillm_data.bits import Bits, checkpoint_of
from minillm_data.output import Output, key_of
from minillm_data.report import Examples, page
from minillm_data.rows import Malformed, Row, Rows
from minillm_data.rules import NONE, SETS, Document, Rule, RuleSet, edit, select
from minillm_lab.page import section, table

DEFAULT = "gopher,fineweb"
"""The rules that are asked where none are named."""

PROBABILITY = 0.5
"""The least probability of a language, where another is not asked for."""

LANGUAGE_CHARACTERS = 4000
"""Characters at the beginning of a document that its language is told by."""


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
    say: Callable[[str], None] = lambda line: None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the documents that every rule lets through, byte for byte unless a rule edits lines.

    The language is asked first, then the rules in the order of their names, then the model. A
    document is counted under the first reason that drops it. After a kill the same call goes on.

    Args:
        paths: files or folders of text or JSON lines.
        to: the folder to write, which does not exist yet.
        rules: names, see :func:`minillm_data.rules.select`; default: DEFAULT.
        languages: codes that py3langid knows ("en"); a document's most likely one must be among
            them. Empty: the language is not asked.
        language_probability: of that language, at least, from 0 to 1; default: PROBABILITY.
        model: a run's folder, for bits per byte over the first tokens of each document
            (:data:`minillm_data.bits.TOKENS`).
        min_bits: bits per byte under the model, at least: what is repeated has few.
        max_bits: the same, at most: what is garbled has many.
        malformed: what happens to a document that cannot be read, or holds ids and no text.
        say: prints a line for people.
        progress: is called with the bytes that are read.

    Returns:
        The report, as report.json has it: ``counts`` (documents) and ``bytes`` (of their lines as
        they were read) by what became of them, ``lines`` that rules removed or changed, ``examples``
        and more.

    Raises:
        ConfigError: an option is wrong, or has no effect.
        Refusal: py3langid is not installed, or there is no such run.
        DataError: a document cannot be read, or the folder cannot be written.
    """
    sets = select(DEFAULT if rules is None else rules)
    _check(sets, languages, language_probability, model, min_bits, max_bits)
    least = PROBABILITY if language_probability is None else language_probability
    language = language_rule(languages, least) if languages else None
    asked = {
        "rules": {name: rule_set.names for name, rule_set in sets.items()},
        "languages": [*languages],
        "language_probability": least if languages else None,
        "model": None if model is None else checkpoint_of(model),
        "min_bits": min_bits,
        "max_bits": max_bits,
    }
    source = Rows(paths, malformed, say)
    key = key_of("filter", source.sources, **asked, malformed=malformed)
    with Output(Path(to), key) as output:
        if output.note:
            say(output.note)
        state = output.state
        examples = Examples(state.more.get("examples"))
        lines, sizes = (Counter[str](state.more.get(name, {})) for name in ("lines", "bytes"))
        state.more |= {"examples": examples.found, "lines": lines, "bytes": sizes}
        state.more.setdefault("written", 0)
        with ExitStack() as stack:
            measure = None
            if model is not None:
                bits = stack.enter_context(Bits(model, output.folder / "model"))
                measure = bits_rule(bits, min_bits, max_bits)
            whole = Filter(language, sets, measure)
            for row in islice(source.read("filtering", progress), state.rows, None):
                verdict = whole.judge(row, malformed)
                for name, line in verdict.edits:
                    lines[name] += 1
                    examples.add(f"{name} (a line)", row.where, line)
                if verdict.reason is None:
                    output.write(verdict.line)
                else:
                    examples.add(verdict.reason, row.where, row.text or plain(row.line.decode()))
                state.counts[verdict.reason or "kept"] += 1
                sizes[verdict.reason or "kept"] += len(row.line)
                state.more["written"] += len(verdict.line)
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


@dataclass(frozen=True)
class Verdict:
    """What becomes of a document.

    Attributes:
        reason: why it is dropped; None: it is kept.
        line: what is written where it is kept.
        edits: the rule and the line as it was, for each line that was removed or changed.
    """

    reason: str | None
    line: bytes = b""
    edits: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Filter:
    """Rules in the order in which they are asked.

    Attributes:
        language: asked first.
        sets: asked next, by name.
        measure: asked last, since it takes longest.
    """

    language: Rule | None = None
    sets: Mapping[str, RuleSet] = field(default_factory=dict)
    measure: Rule | None = None

    def judge(self, row: Row, malformed: Malformed = "strict") -> Verdict:
        """Ask the rules about a row until one drops it.

        Raises:
            DataError: it holds ids where ``malformed`` is strict, or is a chat whose lines would
                be edited.
        """
        if row.text is None:
            if malformed == "skip":
                return Verdict("ids: no text to judge")
            raise DataError(
                "the document holds ids, and rules read text",
                where=row.where,
                fix="give the text that they were made from, or --malformed skip to count and drop them",
            )
        document, edits = Document(row.text), []
        reason = self.language(document) if self.language else None
        for name, rules in self.sets.items():
            if reason is None:
                reason = _first(name, rules.rules, document)
            if reason is None and rules.lines:
                _check_editable(row, name)
                document = Document(edit(document.text, rules.lines, name, edits))
            if reason is None:
                reason = _first(name, rules.rest, document)
        if reason is None and not document.text.strip():
            reason = "empty: no line is left"
        if reason is None and self.measure:
            reason = self.measure(document)
        if reason is not None:
            return Verdict(reason, edits=edits)
        return Verdict(
            None, row.line if document.text == row.text else _edited(row, document), edits
        )


def _first(name: str, rules: Mapping[str, Rule], document: Document) -> str | None:
    """Return the first reason of a set's rules: ``gopher.short: fewer than 50 words``."""
    for one, rule in rules.items():
        if reason := rule(document):
            return f"{name}.{one}: {reason}"
    return None


def _check_editable(row: Row, name: str) -> None:
    if not isinstance(row.record.get("text"), str):
        raise DataError(
            f"{name} removes lines, and a chat's messages are not edited",
            where=row.where,
            fix=f"leave {name} out of --rules for chats",
        )


def _edited(row: Row, document: Document) -> bytes:
    """Write a row with another text; all else in its line stays, byte for byte."""
    line = row.line.decode("utf-8")
    begin, end = _place_of_text(line)
    text = json.dumps(document.text, ensure_ascii=False)
    return f"{line[:begin]}{text}{line[end:]}".encode()


def _place_of_text(line: str) -> tuple[int, int]:
    """Find where the value of "text" begins and ends in a JSON object that has one."""
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


def language_rule(languages: Sequence[str], least: float) -> Rule:
    """Make the rule that a document is in one of some languages.

    Args:
        languages: codes.
        least: probability of the language that is most likely.

    Raises:
        Refusal: py3langid is not installed.
        ConfigError: it does not know a code.
    """
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise Refusal(
            "py3langid, which tells the language of a text, is not installed",
            where="--language",
            fix=pip_line("minillm-data[langid]"),
        ) from error
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    known = sorted(identifier.labels)
    for code in languages:
        if code not in known:
            raise ConfigError(
                f"py3langid knows no language {code!r}",
                where="--language",
                fix=f"a code of ISO 639, one of {', '.join(known)}",
            )

    def language(document: Document) -> str | None:
        found, probability = identifier.classify(document.text[:LANGUAGE_CHARACTERS])
        if found not in languages:
            return f"language: {found}"
        return (
            None if probability >= least else f"language: {found}, but less likely than {least:g}"
        )

    return language


def bits_rule(bits: Bits, least: float | None, most: float | None) -> Rule:
    """Make the rule that a document has so many bits per byte under a checkpoint."""

    def measure(document: Document) -> str | None:
        found = bits(document.text)
        if least is not None and found < least:
            return f"bits: fewer than {least:g} bits per byte"
        return (
            f"bits: more than {most:g} bits per byte" if most is not None and found > most else None
        )

    return measure


def _check(
    sets: Mapping[str, RuleSet],
    languages: Sequence[str],
    probability: float | None,
    model: str | Path | None,
    least: float | None,
    most: float | None,
) -> None:
    bounded = least is not None or most is not None
    if probability is not None and not languages:
        raise ConfigError(
            "a probability of no language has no effect",
            where="--language-probability",
            fix="add --language en",
        )
    if probability is not None and not 0 <= probability <= 1:
        raise ConfigError(
            f"{probability:g} is no probability", where="--language-probability", fix="0 to 1"
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
            "a bound that is no number of bits",
            where="--min-bits, --max-bits",
            fix="a number from 0 on, such as 2.5",
        )
    if least is not None and most is not None and least > most:
        raise ConfigError(
            f"no document has at least {least:g} bits per byte and at most {most:g}",
            where="--min-bits, --max-bits",
            fix="the smaller one is --min-bits",
        )
    if not (sets or languages or model):
        raise ConfigError(
            "nothing is asked of the documents",
            where=f"--rules {NONE}",
            fix="name rules, or add --language or --model",
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
