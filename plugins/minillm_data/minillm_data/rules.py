"""Heuristic quality filters of C4, Gopher and FineWeb, as published.

A rule maps a document to the reason for dropping it, or to None. A reason is a fixed text, so that
drops can be counted by reason. A line rule maps a line to the kept or changed line, or to None.
:data:`SETS` holds all rules by name; :func:`select` chooses among them.

Words are separated by white space. Lines and paragraphs (separated by blank lines) are compared
with surrounding white space stripped, and blank ones are not counted. Shares of characters are
relative to the characters of all words, without white space.

The sets were designed for English web pages. They misjudge books with hard line breaks and API
references: read the examples in the report before trusting its drops.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from minillm_core import ConfigError
from minillm_core.commands import nearest


class Document:
    """A document under quality rules, with cached statistics that several rules share.

    Args:
        text: the document's text.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def words(self) -> list[str]:
        """The words, in order."""
        return self.text.split()

    @cached_property
    def lines(self) -> list[str]:
        """The non-blank lines, stripped."""
        return [line for line in map(str.strip, self.text.split("\n")) if line]

    @cached_property
    def paragraphs(self) -> list[str]:
        """The non-blank paragraphs, stripped."""
        return [part for part in map(str.strip, _PARAGRAPH.split(self.text)) if part]

    @cached_property
    def lengths(self) -> np.ndarray:
        """The number of characters of each word, int64 (words,)."""
        return np.fromiter(map(len, self.words), np.int64, len(self.words))

    @cached_property
    def characters(self) -> int:
        """The number of characters of all words; at least 1, so that it is a safe divisor."""
        return int(self.lengths.sum()) or 1


_PARAGRAPH = re.compile(r"\n\s*\n")

Rule = Callable[[Document], str | None]
"""Document -> the reason for dropping it; None: kept."""

LineRule = Callable[[str], str | None]
"""Line, without its LF -> the kept or changed line; None: removed."""


@dataclass(frozen=True)
class RuleSet:
    """The rules of one paper, in order of application.

    Attributes:
        paper: the citation.
        rules: rules applied to the unmodified document.
        lines: line rules, applied next; each line is kept, changed or removed.
        rest: rules applied to the remaining lines.
    """

    paper: str
    rules: Mapping[str, Rule] = field(default_factory=dict)
    lines: Mapping[str, LineRule] = field(default_factory=dict)
    rest: Mapping[str, Rule] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The names of all rules of the set."""
        return [*self.rules, *self.lines, *self.rest]

    def only(self, names: Iterable[str]) -> RuleSet:
        """Return a set restricted to the named rules."""
        kept = set(names)

        def some(rules: Mapping[str, Callable]) -> dict[str, Callable]:
            return {name: rule for name, rule in rules.items() if name in kept}

        return RuleSet(self.paper, some(self.rules), some(self.lines), some(self.rest))


# C4: Raffel et al. 2020, section 2.2; thresholds of the JMLR version and of its published code.

TERMINAL = (".", "!", "?", '"', "'", "”", "’", "。", "！", "？")
"""Terminal punctuation: a full stop, exclamation or question mark, or a closing quotation mark."""

_CITATION = re.compile(r"\[(?:\d*|edit|citation needed)\]")
# The lookbehind prevents quadratic time: a long run of dots would be scanned again from each dot.
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++[\"'”’)\]]*+(?=\s|$)|[。！？]")
_POLICIES = (
    *("terms of use", "privacy policy", "cookie policy"),
    *("uses cookies", "use of cookies", "use cookies"),
)


def lorem_ipsum(document: Document) -> str | None:
    """Drop a page with the placeholder text "lorem ipsum"."""
    return 'has "lorem ipsum"' if "lorem ipsum" in document.text.lower() else None


def curly_bracket(document: Document) -> str | None:
    """Drop a page with a curly bracket: it probably contains code."""
    return "has a curly bracket" if "{" in document.text else None


def citations(line: str) -> str:
    """Remove citation markers ([1], [edit], [citation needed]) from a line."""
    return _CITATION.sub("", line)


def long_word(line: str) -> str | None:
    """Remove a line that contains a word of more than 1,000 characters."""
    return None if len(line) > 1000 and max(map(len, line.split()), default=0) > 1000 else line


def punctuation(line: str) -> str | None:
    """Remove a line that does not end with terminal punctuation, or ends with an ellipsis."""
    end = line.rstrip()
    return line if end.endswith(TERMINAL) and not end.endswith("...") else None


def line_words(line: str) -> str | None:
    """Remove a line of fewer than 5 words."""
    return line if len(line.split(None, 5)) >= 5 else None


def javascript(line: str) -> str | None:
    """Remove a line with the word Javascript: usually a notice to enable it."""
    return None if "javascript" in line.lower() else line


def policy(line: str) -> str | None:
    """Remove a line of a policy notice: "terms of use", "uses cookies"."""
    lower = line.lower()
    return None if any(phrase in lower for phrase in _POLICIES) else line


def sentences(document: Document) -> str | None:
    """Drop a page of fewer than 3 sentences, counted by sentence-ending punctuation."""
    ends = sum(1 for _ in _SENTENCE_END.finditer(document.text))
    return "fewer than 3 sentences" if ends < 3 else None


C4 = RuleSet(
    "Raffel et al. 2020, Exploring the Limits of Transfer Learning with a Unified Text-to-Text "
    "Transformer, section 2.2; without its list of bad words and its deduplication",
    rules={"lorem-ipsum": lorem_ipsum, "curly-bracket": curly_bracket},
    lines={
        "citations": citations,
        "long-word": long_word,
        "punctuation": punctuation,
        "line-words": line_words,
        "javascript": javascript,
        "policy": policy,
    },
    rest={"sentences": sentences},
)


# Gopher: Rae et al. 2021, appendix A.1.1, and table A1 for repetition.

BULLETS = ("•", "‣", "▪", "◦", "●", "○", "■", "□", "-", "*", "–", "\u00b7")
"""Prefixes of a list item."""

_ELLIPSES = ("...", "…")
_STOP_WORD = re.compile(r"\b(the|be|to|of|and|that|have|with)\b", re.IGNORECASE)


def short(document: Document) -> str | None:
    """Drop a document of fewer than 50 words."""
    return "fewer than 50 words" if len(document.words) < 50 else None


def long(document: Document) -> str | None:
    """Drop a document of more than 100,000 words, including whole books."""
    return "more than 100,000 words" if len(document.words) > 100_000 else None


def word_length(document: Document) -> str | None:
    """Drop a document whose mean word length is below 3 or above 10 characters."""
    mean = document.characters / (len(document.words) or 1)
    if mean < 3:
        return "fewer than 3 characters a word"
    return "more than 10 characters a word" if mean > 10 else None


def symbols(document: Document) -> str | None:
    """Drop a document with more than 0.1 hash signs, or 0.1 ellipses, per word."""
    allowed = 0.1 * len(document.words)
    if document.text.count("#") > allowed:
        return "more than 0.1 hash signs a word"
    ellipses = sum(map(document.text.count, _ELLIPSES))
    return "more than 0.1 ellipses a word" if ellipses > allowed else None


def bullets(document: Document) -> str | None:
    """Drop a document in which more than 90 % of lines begin with a bullet."""
    found = sum(line.startswith(BULLETS) for line in document.lines)
    return "more than 90 % of lines are bullets" if found > 0.9 * len(document.lines) else None


def ellipses(document: Document) -> str | None:
    """Drop a document in which more than 30 % of lines end with an ellipsis."""
    found = sum(line.endswith(_ELLIPSES) for line in document.lines)
    return "more than 30 % of lines end with ..." if found > 0.3 * len(document.lines) else None


def alphabetic(document: Document) -> str | None:
    """Drop a document in which fewer than 80 % of words contain a letter."""
    mixed = [word for word in document.words if not word.isalpha()]
    without = sum(not any(map(str.isalpha, word)) for word in mixed)
    few = len(document.words) - without < 0.8 * len(document.words)
    return "fewer than 80 % of words have a letter" if few else None


def stop_words(document: Document) -> str | None:
    """Drop a document with fewer than two of the stop words the, be, to, of, and, that, have, with."""
    seen: set[str] = set()
    for match in _STOP_WORD.finditer(document.text):
        seen.add(match[0].lower())
        if len(seen) == 2:
            return None
    return "fewer than two of the English stop words"


def _repeated(parts: Sequence[str]) -> tuple[int, int]:
    """Count the repetitions of earlier parts, and their characters without white space."""
    counts = Counter(parts)
    more = [(part, n - 1) for part, n in counts.items() if n > 1]
    return sum(n for _, n in more), sum(n * len("".join(part.split())) for part, n in more)


def repeated_lines(document: Document) -> str | None:
    """Drop a document in which repeated lines are over 30 % of lines, or 20 % of characters."""
    return _too_repeated(document, document.lines, "lines")


def repeated_paragraphs(document: Document) -> str | None:
    """Drop a document in which repeated paragraphs are over 30 % of paragraphs, or 20 % of characters."""
    return _too_repeated(document, document.paragraphs, "paragraphs")


def _too_repeated(document: Document, parts: Sequence[str], name: str) -> str | None:
    count, characters = _repeated(parts)
    if count > 0.3 * len(parts):
        return f"more than 30 % of {name} are repeated"
    if characters > 0.2 * document.characters:
        return f"more than 20 % of characters are in repeated {name}"
    return None


FREQUENT = {2: 0.20, 3: 0.18, 4: 0.16}
"""n -> maximum share of characters in the most frequent n-gram of words."""

REPEATED = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}
"""n -> maximum share of characters in repeated n-grams of words."""


def ngrams(document: Document) -> str | None:
    """Drop a document whose repeated n-grams exceed the shares in FREQUENT or REPEATED.

    A character in several repeated n-grams is counted once. The first occurrence of an n-gram does
    not count as a repetition, as for lines.
    """
    table: defaultdict[str, int] = defaultdict()
    table.default_factory = table.__len__  # numbers words by first occurrence
    ids = np.fromiter(map(table.__getitem__, document.words), np.int64, len(document.words))
    lengths = document.lengths
    ends = np.concatenate([[0], np.cumsum(lengths)])  # characters before each word
    # A longer n-gram can repeat only if a shorter one does: `at` keeps the positions of repeated
    # n-grams, and `code` their numbers.
    at, code = np.arange(len(ids)), ids
    for n in range(2, max(REPEATED) + 1):
        inside = at + n <= len(ids)
        at, code = at[inside], code[inside]
        code = code * len(table) + ids[at + n - 1]
        _, first, code, counts = np.unique(
            code, return_index=True, return_inverse=True, return_counts=True
        )
        if not (counts > 1).any():
            return None
        if n in FREQUENT:
            where = at[first]
            size = counts * (ends[where + n] - ends[where])
            if size[counts == counts.max()].max() > FREQUENT[n] * document.characters:
                return (
                    f"the most frequent {n}-gram has over {100 * FREQUENT[n]:.0f} % of characters"
                )
        else:
            again = np.ones(len(at), bool)
            again[first] = False
            edges = np.zeros(len(ids) + 1, np.int64)
            edges[at[again]] += 1
            edges[at[again] + n] -= 1
            covered = np.cumsum(edges[:-1]) > 0
            if lengths[covered].sum() > REPEATED[n] * document.characters:
                return f"repeated {n}-grams have over {100 * REPEATED[n]:.0f} % of characters"
        twice = counts[code] > 1
        at, code = at[twice], code[twice]
    return None


GOPHER = RuleSet(
    "Rae et al. 2021, Scaling Language Models: Methods, Analysis & Insights from Training Gopher, "
    "appendix A.1.1 and table A1",
    rules={
        "short": short,
        "long": long,
        "word-length": word_length,
        "symbols": symbols,
        "bullets": bullets,
        "ellipses": ellipses,
        "alphabetic": alphabetic,
        "stop-words": stop_words,
        "lines": repeated_lines,
        "paragraphs": repeated_paragraphs,
        "ngrams": ngrams,
    },
)


# FineWeb: Penedo et al. 2024, section 3.6.


def line_ends(document: Document) -> str | None:
    """Drop a document in which 12 % or fewer of lines end with terminal punctuation."""
    found = sum(line.endswith((*TERMINAL, "…")) for line in document.lines)
    few = found <= 0.12 * len(document.lines)
    return "12 % or fewer of lines end with punctuation" if few else None


def short_lines(document: Document) -> str | None:
    """Drop a document in which 67 % or more of lines are shorter than 30 characters."""
    found = sum(len(line) < 30 for line in document.lines)
    many = found >= 0.67 * len(document.lines)
    return "67 % or more of lines have under 30 characters" if many else None


def repeated_characters(document: Document) -> str | None:
    """Drop a document in which repeated lines hold 10 % or more of the characters."""
    _, characters = _repeated(document.lines)
    many = characters >= 0.1 * document.characters
    return "10 % or more of characters are in repeated lines" if many else None


FINEWEB = RuleSet(
    "Penedo et al. 2024, The FineWeb Datasets: Decanting the Web for the Finest Text Data at Scale, "
    "section 3.6; its authors used them with gopher and c4,-c4.punctuation",
    rules={
        "line-ends": line_ends,
        "short-lines": short_lines,
        "repeated-lines": repeated_characters,
    },
)

SETS: dict[str, RuleSet] = {"c4": C4, "gopher": GOPHER, "fineweb": FINEWEB}
"""Rule sets by name."""

NONE = "none"
"""The name that selects no rules."""


def select(text: str) -> dict[str, RuleSet]:
    """Select rules by name.

    Args:
        text: comma-separated sets and rules, in order of application: ``gopher,fineweb``;
            ``c4,-c4.punctuation`` excludes one rule, ``gopher.short`` includes a single one;
            ``none``.

    Raises:
        ConfigError: a name is unknown, or has no effect.
    """
    if text.strip() == NONE:
        return {}
    chosen: dict[str, list[str]] = {}
    for given in text.split(","):
        name = given.strip()
        group, dot, one = name.removeprefix("-").partition(".")
        _check_known(name)
        kept = chosen.get(group, [])
        if name.startswith("-"):
            if one not in kept:
                raise _useless(name, "removes what was not chosen", f"{group},{name}")
            kept.remove(one)
        elif dot:
            if one in kept:
                raise _useless(name, "is chosen already", "name it once")
            chosen.setdefault(group, []).append(one)
        elif kept:
            raise _useless(name, "is chosen already", "name it once, before what is left out of it")
        else:
            chosen[group] = SETS[group].names
    if empty := [group for group, kept in chosen.items() if not kept]:
        raise _useless(empty[0], "has no rule left", "leave it out")
    return {group: SETS[group].only(kept) for group, kept in chosen.items()}


def _check_known(name: str) -> None:
    bare = name.removeprefix("-")
    singles = [f"{group}.{one}" for group, rules in SETS.items() for one in rules.names]
    known = singles if name.startswith("-") else [*SETS, *singles]
    if bare in known:
        return
    close = nearest(bare, known)
    group = bare.partition(".")[0]
    listed = [one for one in known if one.startswith(f"{group}.")] or [*SETS, NONE]
    raise ConfigError(
        f"{name!r} is not a rule" if bare else "an empty name is not a rule",
        where="--rules",
        fix=f"did you mean {close}?" if close else f"one of {', '.join(listed)}",
    )


def _useless(name: str, why: str, fix: str) -> ConfigError:
    return ConfigError(f"{name} {why}", where="--rules", fix=fix)


def edit(text: str, lines: Mapping[str, LineRule], name: str, edits: list[tuple[str, str]]) -> str:
    """Apply line rules to each line of a text.

    Args:
        text: the document's text.
        lines: rules by name, applied in order until one removes the line.
        name: the name of the rule set.
        edits: receives the rule's name and the original line for each removal or change.

    Returns:
        The remaining lines, joined by LF; the same text if no rule changed a line.
    """
    kept: list[str] = []
    for line in text.split("\n"):
        left: str | None = line
        for one, rule in lines.items():
            before, left = left, rule(left)
            if left != before:
                edits.append((f"{name}.{one}", line))
            if left is None:
                break
        if left is not None:
            kept.append(left)
    return "\n".join(kept)
