"""Tests of streamed text: pieces without incomplete characters, equal to the whole when joined."""

from __future__ import annotations

from itertools import product

from hypothesis import example, given
from hypothesis import strategies as st

from minillm_core.text import printable
from minillm_core.train.generate import pieces

FACE = "\U0001f600".encode()
parts = st.sampled_from(
    [b"a", "\u00fc".encode(), FACE, FACE[:2], FACE[2:], b"\xff", b"\xed\xa0\x80", b"\x1b", b"[31m",
     b"\x1b[1;2", b"\x1b]0;", b"\x07", b"\x1b\\", "\ufffd".encode(), b"\r\n", b""]
)  # fmt: skip
anything = st.binary(max_size=20) | st.lists(parts, max_size=9).map(b"".join)


def whole(data: bytes) -> str:
    """Decode everything at once, without an incomplete character at the end."""
    return data[: len(data) - unfinished(data)].decode(errors="replace")


def unfinished(data: bytes) -> int:
    """Return the incomplete character at the end."""
    for size in (3, 2, 1):
        for more in product((b"\x80", b"\x90", b"\xa0"), *[(b"", b"\x80")] * 2):
            try:
                end = (data[-size:] + b"".join(more)).decode(errors="surrogatepass")
                if len(end) == 1 and size <= len(data):  # Python also waits for surrogates
                    return size
            except UnicodeDecodeError:
                continue
    return 0


def written(bytewise, data: bytes, before: str = "") -> list[str]:
    return list(pieces((byte + 1 for byte in data), bytewise.stream(), before))


@example(b"a\x1b[1;2", "")
@example(b"", "a\x1b")
@example(b"\xed\xb0", "")
@given(anything, st.text(max_size=5) | st.just("\x1b["))
def test_joined_they_are_the_whole_text(bytewise, data: bytes, before: str) -> None:
    assert "".join(written(bytewise, data, before)) == printable(before + whole(data))


@given(st.text(st.characters(exclude_categories=["C"]), max_size=9))
def test_a_character_comes_as_soon_as_it_is_there(bytewise, text: str) -> None:
    assert written(bytewise, text.encode()) == list(text)


def test_the_text_that_is_continued_comes_first_and_before_anything_is_asked_of_the_model(
    bytewise,
) -> None:
    def never():
        raise AssertionError
        yield

    assert next(pieces(never(), bytewise.stream(), "Once")) == "Once"


@given(anything, anything)
def test_no_piece_is_of_a_control_sequence(bytewise, data: bytes, more: bytes) -> None:
    for piece in written(bytewise, data + b"\x1b[31;1;" + more):
        assert piece == printable(piece)
        assert piece
