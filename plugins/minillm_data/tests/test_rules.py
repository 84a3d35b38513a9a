"""Each rule drops documents just beyond its threshold, and keeps those at it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core import ConfigError
from minillm_data import rules
from minillm_data.rules import FREQUENT, REPEATED, SETS, Document, edit, select


def dropped(rule: rules.Rule, text: str) -> bool:
    return rule(Document(text)) is not None


def lines(count: int, of: int, special: str, other: str = "An ordinary line number {}.") -> str:
    """Return ``of`` lines: ``count`` of one pattern, the rest of another."""
    return "\n".join((special if i < count else other).format(i) for i in range(of))


# C4


@pytest.mark.parametrize(
    ("rule", "line", "kept"),
    [
        (rules.punctuation, "It ends here.", True),
        (rules.punctuation, "Does it end here?  ", True),
        (rules.punctuation, "It ends!", True),
        (rules.punctuation, '"It ends"', True),
        (rules.punctuation, "“It ends”", True),
        (rules.punctuation, "Home | News", False),
        (rules.punctuation, "read more...", False),
        (rules.punctuation, "in a list:", False),
        (rules.punctuation, "", False),
        (rules.line_words, "one two three four five", True),
        (rules.line_words, "one two three four", False),
        (rules.javascript, "Please enable JavaScript to see this.", False),
        (rules.javascript, "Please enable scripts to see this.", True),
        (rules.policy, "Read our Privacy Policy here.", False),
        (rules.policy, "This site uses cookies.", False),
        (rules.policy, "The cook uses cookie dough.", True),
        (rules.long_word, "a " + "x" * 1000, True),
        (rules.long_word, "a " + "x" * 1001, False),
        (rules.long_word, "word " * 400, True),
    ],
)
def test_a_line_of_c4_is_kept_whole_or_removed(rule: rules.LineRule, line: str, kept: bool) -> None:
    assert rule(line) == (line if kept else None)


def test_citation_markers_are_taken_out_of_a_line() -> None:
    line = "Rome[1] was[23] not[citation needed] built[edit] in[] a day [sic]."
    assert rules.citations(line) == "Rome was not built in a day [sic]."


@pytest.mark.parametrize(
    ("rule", "text", "reason"),
    [
        (rules.lorem_ipsum, "Then Lorem Ipsum dolor.", 'has "lorem ipsum"'),
        (rules.lorem_ipsum, "Lorem and ipsum.", None),
        (rules.curly_bracket, "int main() { }", "has a curly bracket"),
        (rules.curly_bracket, "int main() [ ]", None),
        (rules.sentences, "One. Two!", "fewer than 3 sentences"),
        (rules.sentences, "One. Two! Three?", None),
        (rules.sentences, 'He said "one." Then "two." And (three.)', None),
        (rules.sentences, "Version 3.11.2 is out.", "fewer than 3 sentences"),
        (rules.sentences, "一。二。三。", None),
    ],
)
def test_a_page_of_c4_is_dropped(rule: rules.Rule, text: str, reason: str | None) -> None:
    assert rule(Document(text)) == reason


def test_lines_are_edited_in_the_order_of_the_rules() -> None:
    edits: list[tuple[str, str]] = []
    text = "Menu\nThis line has enough words[1].\n\nEnable javascript to go on reading."
    assert edit(text, rules.C4.lines, "c4", edits) == "This line has enough words."
    assert edits == [
        ("c4.punctuation", "Menu"),
        ("c4.citations", "This line has enough words[1]."),
        ("c4.punctuation", ""),
        ("c4.javascript", "Enable javascript to go on reading."),
    ]


@given(st.text(st.sampled_from("ab .!?\n\r\t[1]{\u2028"), max_size=60))
def test_what_is_left_of_a_text_are_lines_of_it_in_order(text: str) -> None:
    rest = iter(text.split("\n"))
    edits: list[tuple[str, str]] = []
    some = {name: rule for name, rule in rules.C4.lines.items() if name != "citations"}
    left = edit(text, some, "c4", edits)
    for line in left.split("\n") if left else []:
        assert line in rest  # reads on behind the one before
    if not edits:
        assert left == text
    assert len(edits) + (len(left.split("\n")) if left else 0) in (
        text.count("\n") + 1,
        text.count("\n") + 2,  # nothing is left, and "" is a line too
    )


# Gopher


def words(count: int, word: str = "word{}") -> str:
    return " ".join(word.format(i) for i in range(count))


@pytest.mark.parametrize(
    ("rule", "passes", "fails"),
    [
        (rules.short, words(50), words(49)),
        (rules.long, words(100_000), words(100_001)),
        (rules.word_length, "abc abc", "abc ab"),
        (rules.word_length, "x" * 10, "x" * 11),
        (rules.symbols, "# " + words(9), "# " + words(8)),
        (rules.symbols, "... " + words(9), "... " + words(8)),
        (rules.symbols, "… " + words(9), "… " + words(8)),
        (rules.bullets, lines(9, 10, "- item {}"), lines(10, 10, "- item {}")),
        (rules.bullets, lines(9, 10, "  • item {}"), lines(91, 100, "  • item {}")),
        (rules.ellipses, lines(3, 10, "more {}..."), lines(4, 10, "more {}...")),
        (rules.ellipses, lines(3, 10, "more {}… "), lines(4, 10, "more {}… ")),
        (rules.alphabetic, words(8) + " 1 2", words(7) + " 1 2 _3_"),
        (rules.alphabetic, "é " * 4 + "1", "é " * 3 + "1"),
        (rules.stop_words, "The end of.", "The the end."),
        (rules.stop_words, "to BE", "tobe bethe"),
        (rules.repeated_lines, lines(4, 10, "same"), lines(5, 10, "same")),
        (
            rules.repeated_paragraphs,
            lines(4, 10, "a\n", "An ordinary one, {}.\n"),
            lines(5, 10, "a\n", "An ordinary one, {}.\n"),
        ),
    ],
)
def test_a_document_of_gopher_is_dropped_beyond_the_threshold(
    rule: rules.Rule, passes: str, fails: str
) -> None:
    assert not dropped(rule, passes)
    assert dropped(rule, fails)


def test_repeated_lines_count_by_their_characters_too() -> None:
    # 2 of 10 lines are repetitions, but of long ones: 40 of 40 + 20 + 7 * 10 characters
    text = "\n".join(["x" * 20] * 3 + [f"{i}" * 10 for i in range(7)])
    reason = rules.repeated_lines(Document(text))
    assert reason == "more than 20 % of characters are in repeated lines"
    assert not dropped(rules.repeated_lines, text.replace("x" * 20, "x"))


def shares(text: str) -> dict[int, float]:
    """Compute by brute force n -> the share of characters in the most frequent or in repeated n-grams."""
    found = text.split()
    total, result = sum(map(len, found)) or 1, {}
    for n in (*FREQUENT, *REPEATED):
        grams = [tuple(found[i : i + n]) for i in range(len(found) - n + 1)]
        if n in FREQUENT:
            most = max(Counter(grams).values(), default=0)
            sizes = [
                count * len("".join(gram))
                for gram, count in Counter(grams).items()
                if count == most > 1
            ]
            result[n] = max(sizes, default=0) / total
        else:
            seen, covered = set(), set()
            for i, gram in enumerate(grams):
                if gram in seen:
                    covered |= set(range(i, i + n))
                seen.add(gram)
            result[n] = sum(len(found[i]) for i in covered) / total
    return result


@given(
    st.lists(st.sampled_from(["a", "bb", "ccc", "the", "of", *map(str, range(40))]), max_size=80),
    st.integers(1, 3),
    st.integers(0, 60),
)
def test_ngrams_are_counted_as_the_plain_way_does(found: list[str], times: int, other: int) -> None:
    text = " ".join(found * times + [f"other{i}" for i in range(other)])
    measured = shares(text)
    first = next(
        (n for n, most in (FREQUENT | REPEATED).items() if measured[n] > most + 1e-12), None
    )
    reason = rules.ngrams(Document(text))
    assert (reason is None) == (first is None)
    if first is not None:
        assert f"{first}-gram" in str(reason)


def test_the_shares_are_those_of_table_a1() -> None:
    assert FREQUENT == {2: 0.20, 3: 0.18, 4: 0.16}
    assert REPEATED == {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}


@pytest.mark.parametrize(("n", "most"), [*FREQUENT.items(), *REPEATED.items()])
def test_each_length_of_ngrams_has_its_published_share(n: int, most: float) -> None:
    # `n` words again and again between others, until they have just more than the share
    gram = " ".join(f"g{i:02}" for i in range(n))
    occurs = 10
    counted = occurs if n in FREQUENT else occurs - 1
    for slack, reason in ((-3, True), (3, False)):
        others = round(n * counted / most) - n * occurs + slack
        parts, number = [], 0
        for index in range(occurs):
            parts.append(gram)
            until = others * (index + 1) // occurs
            parts += [f"{i:03}" for i in range(number, until)]
            number = until
        text = " ".join(parts)
        found = rules.ngrams(Document(text))
        # a shorter length may be beyond its own share before: that is found first
        assert (found is not None) == reason, (n, slack, found, shares(text))


# FineWeb


@pytest.mark.parametrize(
    ("rule", "passes", "fails"),
    [
        (
            rules.line_ends,
            lines(13, 100, "It ends {}.", "no end {}"),
            lines(12, 100, "It ends {}.", "no end {}"),
        ),
        (
            rules.short_lines,
            lines(66, 100, "{:29}", "{:030}"),
            lines(67, 100, "x{:028}", "{:030}"),
        ),
        (
            rules.repeated_characters,
            "\n".join(["same", "same", *(f"line{i:03}" for i in range(6))]),
            "\n".join(["same", "same", *(f"{i:04}" for i in range(8))]),
        ),
    ],
)
def test_a_document_of_fineweb_is_dropped_at_the_threshold(
    rule: rules.Rule, passes: str, fails: str
) -> None:
    assert not dropped(rule, passes)
    assert dropped(rule, fails)


@given(st.text(max_size=200))
def test_every_rule_answers_for_every_text(text: str) -> None:
    for rule_set in SETS.values():
        for rule in (*rule_set.rules.values(), *rule_set.rest.values()):
            first = rule(Document(text))
            assert first == rule(Document(text))
            assert first is None or first.strip()


@pytest.mark.parametrize(
    "piece", [".", "!?", '."', "\n", " ", "\n \t", "[", "[1", "a", "- ", "#", "…"]
)
def test_no_rule_takes_long_for_a_long_text(piece: str) -> None:
    text = piece * (400_000 // len(piece)) + "x"  # the square of it would take hours
    for name, rule_set in SETS.items():
        for rule in (*rule_set.rules.values(), *rule_set.rest.values()):
            rule(Document(text))
        edit(text, rule_set.lines, name, [])


# Selection


def test_rules_are_selected_by_name() -> None:
    assert {name: found.names for name, found in select("c4, gopher").items()} == {
        "c4": rules.C4.names,
        "gopher": rules.GOPHER.names,
    }
    assert "punctuation" not in select("c4,-c4.punctuation")["c4"].names
    assert select("gopher.short,gopher.ngrams")["gopher"].names == ["short", "ngrams"]
    assert [*select("fineweb,gopher")] == ["fineweb", "gopher"]
    assert select("none") == {}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("gofer", "did you mean gopher"),
        ("gopher.shrot", "did you mean gopher.short"),
        ("zzz", "one of c4, gopher, fineweb, none"),
        ("", "an empty name"),
        ("c4,,gopher", "an empty name"),
        ("none,c4", "'none' is not a rule"),
        ("-c4", "is not a rule"),
        ("c4,-gopher.short", "removes what was not chosen"),
        ("-c4.policy,c4", "removes what was not chosen"),
        ("c4,c4", "is chosen already"),
        ("c4,c4.policy", "is chosen already"),
        ("c4.policy,c4", "is chosen already"),
        ("c4.policy,-c4.policy", "has no rule left"),
    ],
)
def test_a_name_that_means_nothing_is_refused(text: str, what: str) -> None:
    with pytest.raises(ConfigError) as refused:
        select(text)
    assert what in str(refused.value)
