"""Text from elsewhere, made safe to print; the nearest of several names."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from minillm_core.text import counted, few, nearest, plain, printable, printable_so_far

words = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=9)
SEQUENCES = "\x1b[31m \x1b[2J \x1b]0;title\x07 \x1b]8;;http://x\x1b\\ \x1bPq\x1b\\ \x1bc"
LETTERS = "\x00\x07\x08\x7f\x9b\u202e\u2066\ufeff\u200b"
controls = st.sampled_from([*SEQUENCES.split(" "), *LETTERS])


@given(st.text() | st.lists(controls | st.text(), max_size=9).map("".join))
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    shown = plain(text)
    assert not any(unicodedata.category(letter) == "Cc" for letter in shown)
    assert plain(shown) == shown
    assert len(shown) <= 300


@given(st.lists(words, min_size=1, max_size=9), st.data())
def test_the_words_stay(parts: list[str], data: st.DataObject) -> None:
    text = " ".join(part + data.draw(controls) for part in parts)
    assert plain(text) == " ".join(parts)


fragments = st.sampled_from(
    ["\x1b", "[", "]", "P", "\\", "\x07", "31", ";", "m", " ", "/", "0", "~", "a", "\n", "\x9b", "1" * 70,
     " " * 20, "\x1b[" + "1" * 64, "\x1b]", "\x1b" + " " * 16]
)  # fmt: skip


@given(st.lists(st.lists(fragments | st.text(max_size=2), max_size=9).map("".join), max_size=9))
def test_text_in_pieces_is_shown_as_the_whole_of_it(parts: list[str]) -> None:
    shown, held = "", ""
    for part in parts:
        settled, held = printable_so_far(held + part)
        shown += settled
        assert len(held) <= 82
    assert shown + printable(held) == printable("".join(parts))


def test_a_payload_without_end_is_not_kept() -> None:
    assert printable_so_far("a\x1b]0;" + "x" * 1000) == ("a", "\x1b]")
    assert printable_so_far("a\x1b]0;x\x1b") == ("a", "\x1b]\x1b")


def test_long_text_is_cut() -> None:
    assert plain("a" * 400) == "a" * 297 + "..."
    assert plain("abcdef", limit=5) == "ab..."


def test_a_few_names() -> None:
    assert few([]) == ""
    assert few(["a", "b", "c"]) == "a, b, c"
    assert few(("a", "b", "c"), shown=1) == "a and 2 more"


def test_the_nearest_name() -> None:
    assert nearest("widht", ["width", "height"]) == "width"
    assert nearest("zzz", ["width", "height"]) is None
    assert nearest("a", []) is None


def test_one_is_no_plural() -> None:
    assert [counted(n, "slot") for n in range(3)] == ["0 slots", "1 slot", "2 slots"]
