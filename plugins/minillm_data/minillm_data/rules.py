"""Rules that drop documents of poor quality, as C4, Gopher and FineWeb published them.

A rule is a function from a document to the reason why it is dropped, or None. A reason is a fixed
text, so that drops can be counted by it. A line rule is a function from a line to the line as it is
kept, or None. :data:`SETS` has them all by name; :func:`select` chooses.

Words are what stands between white space. Lines and paragraphs (which an empty line ends) are
compared without the white space around them, and blank ones are not counted. Shares of characters
are shares of the characters of all words, white space left out.

The sets are made for English web pages. Books with hard line ends and references of functions are
neither: read a report's examples before you believe its drops.
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
    """A text that rules look at; what several of them need is computed once.

    Args:
        text: of the document.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def words(self) -> list[str]:
        """The words, in order."""
        return self.text.split()

    @cached_property
    def lines(self) -> list[str]:
        """The lines that are not blank, without the white space around them."""
        return [line for line in map(str.strip, self.text.split("\n")) if line]

    @cached_property
    def paragraphs(self) -> list[str]:
        """The paragraphs, without the white space around them."""
        return [part for part in map(str.strip, _PARAGRAPH.split(self.text)) if part]

    @cached_property
    def lengths(self) -> np.ndarray:
        """The characters of each word, int64 (words,)."""
        return np.fromiter(map(len, self.words), np.int64, len(self.words))

    @cached_property
    def characters(self) -> int:
        """The number of characters of all words; at least 1, so that it can divide."""
        return int(self.lengths.sum()) or 1


_PARAGRAPH = re.compile(r"\n\s*\n")

Rule = Callable[[Document], str | None]
"""Document -> why it is dropped; None: it stays."""

LineRule = Callable[[str], str | None]
"""Line, without its LF -> the line as it is kept; None: it is removed."""


@dataclass(frozen=True)
class RuleSet:
    """Rules of one paper, in the order in which they are applied.

    Attributes:
        paper: where they are from.
        rules: asked of the document as it is.
        lines: then each line is kept, changed or removed by these.
        rest: asked of the document that is left.
    """

    paper: str
    rules: Mapping[str, Rule] = field(default_factory=dict)
    lines: Mapping[str, LineRule] = field(default_factory=dict)
    rest: Mapping[str, Rule] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The names of all its rules."""
        return [*self.rules, *self.lines, *self.rest]

    def only(self, names: Iterable[str]) -> RuleSet:
        """Make a set of some of its rules."""
        kept = set(names)

        def some(rules: Mapping[str, Callable]) -> dict[str, Callable]:
            return {name: rule for name, rule in rules.items() if name in kept}

        return RuleSet(self.paper, some(self.rules), some(self.lines), some(self.rest))


# C4: Raffel et al. 2020, section 2.2; thresholds of the JMLR version and of its published code.

TERMINAL = (".", "!", "?", '"', "'", "”", "’", "。", "！", "？")
"""What a finished line ends with: a full stop, exclamation or question mark, or an end quotation mark."""

_CITATION = re.compile(r"\[(?:\d*|edit|citation needed)\]")
# It begins behind no other mark, or a long row of dots would be read again from each of them.
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++[\"'”’)\]]*+(?=\s|$)|[。！？]")
_POLICIES = (
    *("terms of use", "privacy policy", "cookie policy"),
    *("uses cookies", "use of cookies", "use cookies"),
)


def lorem_ipsum(document: Document) -> str | None:
    """Drop a page with the placeholder text "lorem ipsum"."""
    return 'has "lorem ipsum"' if "lorem ipsum" in document.text.lower() else None


def curly_bracket(document: Document) -> str | None:
    """Drop a page with a curly bracket: it is likely to hold code."""
    return "has a curly bracket" if "{" in document.text else None


def citations(line: str) -> str:
    """Take citation markers ([1], [edit], [citation needed]) out of a line."""
    return _CITATION.sub("", line)


def long_word(line: str) -> str | None:
    """Remove a line with a word of more than 1,000 characters."""
    return None if len(line) > 1000 and max(map(len, line.split()), default=0) > 1000 else line


def punctuation(line: str) -> str | None:
    """Remove a line that ends with no terminal punctuation mark, or with an ellipsis."""
    end = line.rstrip()
    return line if end.endswith(TERMINAL) and not end.endswith("...") else None


def line_words(line: str) -> str | None:
    """Remove a line of fewer than 5 words."""
    return line if len(line.split(None, 5)) >= 5 else None


def javascript(line: str) -> str | None:
    """Remove a line with the word Javascript: it asks for it to be switched on."""
    return None if "javascript" in line.lower() else line


def policy(line: str) -> str | None:
    """Remove a line of a policy notice: "terms of use", "uses cookies"."""
    lower = line.lower()
    return None if any(phrase in lower for phrase in _POLICIES) else line


def sentences(document: Document) -> str | None:
    """Drop a page of fewer than 3 sentences; their ends are counted, by punctuation."""
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
"""What a line of a list begins with."""

_ELLIPSES = ("...", "…")
_STOP_WORD = re.compile(r"\b(the|be|to|of|and|that|have|with)\b", re.IGNORECASE)


def short(document: Document) -> str | None:
    """Drop a document of fewer than 50 words."""
    return "fewer than 50 words" if len(document.words) < 50 else None


def long(document: Document) -> str | None:
    """Drop a document of more than 100,000 words; whole books are among them."""
    return "more than 100,000 words" if len(document.words) > 100_000 else None


def word_length(document: Document) -> str | None:
    """Drop a document whose words have fewer than 3 characters on average, or more than 10."""
    mean = document.characters / (len(document.words) or 1)
    if mean < 3:
        return "fewer than 3 characters a word"
    return "more than 10 characters a word" if mean > 10 else None


def symbols(document: Document) -> str | None:
    """Drop a document with more than 0.1 hash signs, or ellipses, for each word."""
    allowed = 0.1 * len(document.words)
    if document.text.count("#") > allowed:
        return "more than 0.1 hash signs a word"
    ellipses = sum(map(document.text.count, _ELLIPSES))
    return "more than 0.1 ellipses a word" if ellipses > allowed else None


def bullets(document: Document) -> str | None:
    """Drop a document with more than 90 % of its lines beginning with a bullet."""
    found = sum(line.startswith(BULLETS) for line in document.lines)
    return "more than 90 % of lines are bullets" if found > 0.9 * len(document.lines) else None


def ellipses(document: Document) -> str | None:
    """Drop a document with more than 30 % of its lines ending with an ellipsis."""
    found = sum(line.endswith(_ELLIPSES) for line in document.lines)
    return "more than 30 % of lines end with ..." if found > 0.3 * len(document.lines) else None


def alphabetic(document: Document) -> str | None:
    """Drop a document with fewer than 80 % of its words having a letter."""
    mixed = [word for word in document.words if not word.isalpha()]
    without = sum(not any(map(str.isalpha, word)) for word in mixed)
    few = len(document.words) - without < 0.8 * len(document.words)
    return "fewer than 80 % of words have a letter" if few else None


def stop_words(document: Document) -> str | None:
    """Drop a document with fewer than two of the words the, be, to, of, and, that, have, with."""
    seen: set[str] = set()
    for match in _STOP_WORD.finditer(document.text):
        seen.add(match[0].lower())
        if len(seen) == 2:
            return None
    return "fewer than two of the English stop words"


def _repeated(parts: Sequence[str]) -> tuple[int, int]:
    """Count the parts that came before, and their characters without white space."""
    counts = Counter(parts)
    more = [(part, n - 1) for part, n in counts.items() if n > 1]
    return sum(n for _, n in more), sum(n * len("".join(part.split())) for part, n in more)


def repeated_lines(document: Document) -> str | None:
    """Drop a document with over 30 % of its lines, or 20 % of its characters, in repeated lines."""
    return _too_repeated(document, document.lines, "lines")


def repeated_paragraphs(document: Document) -> str | None:
    """Drop a document with over 30 % of its paragraphs, or 20 % of its characters, in repeated ones."""
    return _too_repeated(document, document.paragraphs, "paragraphs")


def _too_repeated(document: Document, parts: Sequence[str], name: str) -> str | None:
    count, characters = _repeated(parts)
    if count > 0.3 * len(parts):
        return f"more than 30 % of {name} are repeated"
    if characters > 0.2 * document.characters:
        return f"more than 20 % of characters are in repeated {name}"
    return None


FREQUENT = {2: 0.20, 3: 0.18, 4: 0.16}
"""n -> the share of characters that the most frequent n-gram of words may have."""

REPEATED = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}
"""n -> the share of characters that n-grams of words which came before may have."""


def ngrams(document: Document) -> str | None:
    """Drop a document that repeats itself: by the shares in FREQUENT and REPEATED.

    A character in several repeated n-grams is counted once. The first occurrence of an n-gram is no
    repetition, as for lines.
    """
    table: defaultdict[str, int] = defaultdict()
    table.default_factory = table.__len__  # numbers words as they come
    ids = np.fromiter(map(table.__getitem__, document.words), np.int64, len(document.words))
    lengths = document.lengths
    ends = np.concatenate([[0], np.cumsum(lengths)])  # characters before each word
    # Only where an n-gram occurs twice can a longer one do so: `at` has those places alone, and
    # `code` numbers their n-grams.
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
    """Drop a document with 12 % or fewer of its lines ending with punctuation."""
    found = sum(line.endswith((*TERMINAL, "…")) for line in document.lines)
    few = found <= 0.12 * len(document.lines)
    return "12 % or fewer of lines end with punctuation" if few else None


def short_lines(document: Document) -> str | None:
    """Drop a document with 67 % or more of its lines shorter than 30 characters."""
    found = sum(len(line) < 30 for line in document.lines)
    many = found >= 0.67 * len(document.lines)
    return "67 % or more of lines have under 30 characters" if many else None


def repeated_characters(document: Document) -> str | None:
    """Drop a document with 10 % or more of its characters in repeated lines."""
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
"""Name -> rules."""

NONE = "none"
"""Selects no rules."""


def select(text: str) -> dict[str, RuleSet]:
    """Choose rules by their names.

    Args:
        text: sets and rules, separated by commas, in the order in which they are applied:
            ``gopher,fineweb``; ``c4,-c4.punctuation`` leaves one out, ``gopher.short`` takes one
            alone; ``none``.

    Raises:
        ConfigError: a name is unknown, or changes nothing.
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
                raise _useless(name, "takes away what was not chosen", f"{group},{name}")
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
        f"{name!r} is no rule" if bare else "an empty name is no rule",
        where="--rules",
        fix=f"did you mean {close}?" if close else f"one of {', '.join(listed)}",
    )


def _useless(name: str, why: str, fix: str) -> ConfigError:
    return ConfigError(f"{name} {why}", where="--rules", fix=fix)


def edit(text: str, lines: Mapping[str, LineRule], name: str, edits: list[tuple[str, str]]) -> str:
    """Keep, change or remove each line of a text.

    Args:
        text: of the document.
        lines: name -> rule, asked in order until one removes the line.
        name: of their set.
        edits: takes a rule's name and the line as it was, for each that was removed or changed.

    Returns:
        The lines that are left, joined by LF; the text itself where no rule did anything.
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
