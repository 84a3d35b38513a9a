"""What becomes of a text: asked of processes, which import this module and little else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from minillm_core import ConfigError, Refusal
from minillm_core.commands import pip_line
from minillm_data.rules import Document, Rule, RuleSet, edit, select

PROBABILITY = 0.5
"""The least probability of a language, where another is not asked for."""

LANGUAGE_CHARACTERS = 4000
"""Characters at the beginning of a document that decide its language."""


@dataclass(frozen=True)
class Verdict:
    """What becomes of a document.

    Attributes:
        reason: why it is dropped; None: it is kept.
        text: of which lines were removed or changed; None: it is as it was.
        edits: the rule and the line as it was, for each of these lines.
    """

    reason: str | None
    text: str | None = None
    edits: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Filter:
    """Rules in the order in which they are applied.

    Attributes:
        language: asked first.
        sets: asked next, by name.
    """

    language: Rule | None = None
    sets: Mapping[str, RuleSet] = field(default_factory=dict)

    def judge(self, text: str | None) -> Verdict:
        """Ask the rules about a text until one drops it; None is that of a document of ids."""
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
    """Make the rules that a process asks, once."""
    return Filter(language_rule(languages, least) if languages else None, select(rules))


def judge(
    rules: str, languages: tuple[str, ...], least: float, texts: Sequence[str | None]
) -> list[Verdict]:
    """Judge texts; a process makes the rules once.

    Args:
        rules: names, see :func:`minillm_data.rules.select`.
        languages: codes; none: the language is not asked.
        least: probability of the language.
        texts: None stands for a document of ids.
    """
    return [_filter(rules, languages, least).judge(text) for text in texts]


def _first(name: str, rules: Mapping[str, Rule], document: Document) -> str | None:
    """Return the first reason of a set's rules: ``gopher.short: fewer than 50 words``."""
    for one, rule in rules.items():
        if reason := rule(document):
            return f"{name}.{one}: {reason}"
    return None


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
