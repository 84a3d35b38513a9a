"""Quality and language filters of a single text, run in worker processes.

Worker processes import this module and little else, so that they start fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from minillm_core import ConfigError, Refusal
from minillm_core.commands import pip_line
from minillm_data.rules import Document, Rule, RuleSet, edit, select

PROBABILITY = 0.5
"""Default minimum probability of a language."""

LANGUAGE_CHARACTERS = 4000
"""Characters from the start of a document used for language identification."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of filtering a document.

    Attributes:
        reason: the reason for dropping it; None: kept.
        text: the text after line rules; None: unchanged.
        edits: the rule and the original line, for each removed or changed line.
    """

    reason: str | None
    text: str | None = None
    edits: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Filter:
    """A document filter: a language rule, then rule sets.

    Attributes:
        language: applied first.
        sets: rule sets by name, applied next, in order.
    """

    language: Rule | None = None
    sets: Mapping[str, RuleSet] = field(default_factory=dict)

    def judge(self, text: str | None) -> Verdict:
        """Apply the rules to a text until one drops it; a text of None stands for a document of ids."""
        if text is None:
            return Verdict("ids: no text to judge")
        document, edits = Document(text), []
        reason = self.language(document) if self.language else None
        for name, rules in self.sets.items():
            if reason is None:
                reason = _first(name, rules.rules, document)
            if reason is None and rules.lines:
                document = Document(edit(document.text, rules.lines, name, edits))
            if reason is None:
                reason = _first(name, rules.rest, document)
        if reason is None and not document.text.strip():
            reason = "empty: no line is left"
        return Verdict(reason, None if document.text == text else document.text, edits)


@cache
def _filter(rules: str, languages: tuple[str, ...], least: float) -> Filter:
    """Build the filter, once per process."""
    return Filter(language_rule(languages, least) if languages else None, select(rules))


def judge(
    rules: str, languages: tuple[str, ...], least: float, texts: Sequence[str | None]
) -> list[Verdict]:
    """Filter texts; a process builds the rules once.

    Args:
        rules: names, see :func:`minillm_data.rules.select`.
        languages: ISO 639 codes to keep; empty: no language identification.
        least: minimum probability of the language.
        texts: None stands for a document of ids.
    """
    return [_filter(rules, languages, least).judge(text) for text in texts]


def _first(name: str, rules: Mapping[str, Rule], document: Document) -> str | None:
    """Return the reason of the first rule that drops the document: ``gopher.short: fewer than 50 words``."""
    for one, rule in rules.items():
        if reason := rule(document):
            return f"{name}.{one}: {reason}"
    return None


def language_rule(languages: Sequence[str], least: float) -> Rule:
    """Build a rule that keeps documents in the given languages.

    Args:
        languages: ISO 639 codes.
        least: minimum probability of the most likely language.

    Raises:
        Refusal: py3langid is not installed.
        ConfigError: py3langid does not support a code.
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
