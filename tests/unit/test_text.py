"""Tests of untrusted text made safe to print, and of the nearest of several names."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.text import counted, few, nearest, plain, printable, printable_so_far, rounded

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
    assert [counted(n, "epoch", ".2g") for n in (0.5, 1.01)] == ["0.5 epochs", "1 epoch"]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_long_number_is_read_at_six_digits(number: float) -> None:
    shown = rounded(f"Table(std={number}, rows=50304)")
    assert shown.endswith(", rows=50304)")
    figure = shown.removeprefix("Table(std=").partition(",")[0]
    assert float(figure) == pytest.approx(number, rel=5.01e-6, abs=1e-322)
    mantissa = figure.lstrip("-").partition("e")[0]
    assert number.is_integer() or len(mantissa.replace(".", "").strip("0")) <= 6
    assert rounded(shown) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("std=0.036084391824351615", "std=0.0360844"),
        ("[-0.5000000001, 1.2345678e-07]", "[-0.5, 1.23457e-07]"),
        ("Gated(width=12, lr_mul=150.0, wd_mul=0.0)", "Gated(width=12, lr_mul=150.0, wd_mul=0.0)"),
        ("1048577 50304.0 12345678.0", "1048577 50304.0 12345678.0"),
        ("torch 2.13.0 1.2.34567891 v0.123456789", "torch 2.13.0 1.2.34567891 v0.123456789"),
        ("12345678e95 1.2345678e999", "12345678e95 1.2345678e999"),
    ],
)
def test_only_long_decimals_are_made_shorter(text: str, shown: str) -> None:
    assert rounded(text) == shown
