"""Tests of text and JSON lines: contents, and exact positions of errors."""

from __future__ import annotations

import gzip
import json
import lzma
import tracemalloc
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.data import formats
from minillm_core.data.formats import (
    JSONL,
    SHARD,
    TEXT,
    Formats,
    Reading,
    read_jsonl,
    read_text,
)
from minillm_core.errors import DataError, Refusal

GOOD = b'{"text": "good"}\n'
PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": formats._zstd().compress,
}


def lines(tmp_path: Path, data: bytes, packing: str = "", vocab: int = 100) -> tuple[list, Reading]:
    path = tmp_path / f"data.jsonl{packing}"
    path.write_bytes(PACK[packing](data))
    reading = Reading(vocab)
    found = list(read_jsonl(path, packing, reading))
    return [d if isinstance(d, str) else d.tolist() for d in found], reading


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
documents = st.lists(texts | st.lists(st.integers(0, 99), min_size=1), max_size=8)


@given(documents, st.booleans(), st.sampled_from(sorted(PACK)))
def test_lines_round_trip(
    tmp_path_factory: pytest.TempPathFactory, found: list, ascii: bool, packing: str
) -> None:
    data = "\n".join(
        json.dumps({"text" if isinstance(d, str) else "ids": d, "id": 7}, ensure_ascii=ascii)
        for d in found
    )
    assert lines(tmp_path_factory.mktemp("lines"), data.encode(), packing)[0] == found


@given(texts, st.sampled_from(sorted(PACK)))
def test_a_text_file_is_one_document_with_its_line_ends(
    tmp_path_factory: pytest.TempPathFactory, text: str, packing: str
) -> None:
    path = tmp_path_factory.mktemp("text") / "a"
    path.write_bytes(PACK[packing](text.encode()))
    assert list(read_text(path, packing, Reading(100))) == [text.removeprefix("\ufeff")] or (
        text == "\ufeff"
    )


@pytest.mark.parametrize(
    "line",
    [
        b'{"text": "a\xe2\x80\xa8b\xc2\x85c"}\n',  # U+2028 and U+0085 are not line ends
        b'{"text": "nul \\u0000 inside"}\n',
        b'{"text": "pair \\ud83d\\ude00"}\n',
        b'{"text": "crlf"}\r\n',
        b'{"text": "no last newline"}',
        b'  {"other": [1, {"text": 3}], "text": "keys"}\n',
    ],
)
def test_odd_and_right(tmp_path: Path, line: bytes) -> None:
    found, _ = lines(tmp_path, GOOD + line)
    assert found == ["good", json.loads(line)["text"]]


def test_blank_lines_and_empty_documents_are_counted(tmp_path: Path) -> None:
    found, reading = lines(tmp_path, b'\n{"text": ""}\n \r\n{"ids": []}\n' + GOOD)
    assert found == ["good"]
    assert reading.notes == {"left out: blank lines": 2, "left out: empty documents": 2}


BAD = {
    "bad JSON": (b'{"text": "a"', 13, "not a line of JSON"),
    "bad JSON after two-byte characters": (b'{"\xc3\xa4\xc3\xa4": 1, x}', 12, "not a line of JSON"),
    "two objects": (b'{"text": "a"} {"text": "b"}', 14, "Extra data"),
    "raw control character": (b'{"text": "a\tb"}', 11, "Invalid control character\n"),
    "invalid UTF-8": (b'{"text": "a\xffb"}', 11, "not UTF-8: byte 0xff"),
    "overlong UTF-8": (b'{"text": "\xc0\xaf"}', 10, "not UTF-8"),
    "cut UTF-8": (b'{"text": "\xe2\x82"}', 10, "not UTF-8"),
    "surrogate in UTF-8": (b'{"text": "\xed\xa0\x80"}', 10, "not UTF-8"),
    "bad JSON behind a byte order mark": (b'\xef\xbb\xbf{"text": "a"', 16, "not a line of JSON"),
    "UTF-16": ('{"text": "a"}'.encode("utf-16"), 0, "looks like UTF-16"),
    "lone surrogate": (b'{"text": "ab\\ud800c"}', 0, "lone surrogate, U+D800, at its character 2"),
    "NaN": (b'{"text": "a", "score": NaN}', 0, "NaN is not JSON"),
    "-Infinity": (b'{"text": "a", "score": -Infinity}', 0, "not JSON"),
    "huge int": (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", 0, "not a line of JSON"),
    "deep": (b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 0, "nested too deeply"),
    "null text": (b'{"text": null}', 0, '"text" is null'),
    "integer text": (b'{"text": 5}', 0, '"text" is a number'),
    "boolean text": (b'{"text": true}', 0, '"text" is a boolean'),
    "list text": (b'{"text": ["a"]}', 0, '"text" is a list'),
    "absent text": (b'{"txt": "a", "n": 1}', 0, "neither \"text\" nor \"ids\": it has 'txt', 'n'"),
    "no key": (b"{}", 0, 'neither "text" nor "ids": it has no key'),
    "chat": (b'{"messages": []}', 0, 'chat data: "messages"'),
    "other chat": (b'{"conversations": []}', 0, "train on its answers with --task sft"),
    "duplicate key with a semicolon": (b'{"a;b": 1, "a;b": 2}', 0, "the key 'a;b' occurs twice"),
    "array": (b"[]", 0, "a list instead of a JSON object"),
    "array of the name": (b'["text"]', 0, "a list instead of a JSON object"),
    "string": (b'"text"', 0, "a string instead of a JSON object"),
    "duplicate key": (b'{"text": "a", "text": "b"}', 0, "'text' occurs twice"),
    "ids as a string": (b'{"ids": "12"}', 0, '"ids" is not a list of integers'),
    "float id": (b'{"ids": [1, 2.0]}', 0, '"ids" is not a list of integers'),
    "boolean id": (b'{"ids": [1, true]}', 0, '"ids" is not a list of integers'),
    "negative id": (b'{"ids": [1, -1]}', 0, "id -1 at index 1 is outside"),
    "id beyond": (b'{"ids": [99, 3, 100, -1]}', 0, "id 100 at index 2 is outside"),
    "id that would wrap": (b'{"ids": [65537]}', 0, "id 65537 at index 0"),
    "immense id": (b'{"ids": [' + b"9" * 400 + b"]}", 0, "id 99999999999999999999... at index 0"),
}


@pytest.mark.parametrize("packing", sorted(PACK))
@pytest.mark.parametrize("name", sorted(BAD))
def test_a_bad_line_is_named_with_its_byte(tmp_path: Path, name: str, packing: str) -> None:
    line, byte, said = BAD[name]
    with pytest.raises(DataError) as raised:
        lines(tmp_path, GOOD * 2 + line + b"\n" + GOOD, packing)
    message = str(raised.value)
    assert said in message
    assert f"data.jsonl{packing}, line 3, byte {2 * len(GOOD) + byte}" in message
    assert ("unpacked" in message) == bool(packing)
    assert raised.value.fix
    assert ("quote it" in message) == (name in {"integer text", "boolean text", "list text"})
    assert len(message) < 600


def test_a_byte_order_mark_is_no_part_of_a_line(tmp_path: Path) -> None:
    found, _ = lines(tmp_path, b"\xef\xbb\xbf" + GOOD + b"\xef\xbb\xbf" + GOOD)
    assert found == ["good"] * 2


def test_a_string_that_is_cut_with_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not a line of JSON: Unterminated string\n.* byte 9\n"):
        lines(tmp_path, b'{"text": "a')


@pytest.mark.parametrize("name", sorted(BAD))
def test_a_bad_line_is_left_out_and_counted_where_that_is_wanted(tmp_path: Path, name: str) -> None:
    line, _, _ = BAD[name]
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD * 2 + line + b"\n" + GOOD + line + b"\n" + GOOD)
    reasons: list[str] = []
    reading = Reading(100, malformed=lambda error: reasons.append(error.reason))
    assert list(read_jsonl(path, "", reading)) == ["good"] * 4
    first, second = reasons
    assert first == second
    assert len(first) < 80
    assert not any(character.isdigit() for character in first.replace("UTF-8", "")), (
        "a reason is a kind of error"
    )


def test_a_giant_line_is_left_out_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD + b'{"text": "' + b"a" * (1 << 23) + b'"}\n' + GOOD + b"[]\n")
    errors: list[formats.MalformedError] = []
    reading = Reading(100, malformed=errors.append)
    tracemalloc.start()
    try:
        assert list(read_jsonl(path, "", reading)) == ["good"] * 2
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert [error.reason for error in errors] == [
        "a line longer than 1 MiB",
        "a list instead of a JSON object",
    ]
    assert f"line 4, byte {2 * len(GOOD) + (1 << 23) + 13}" in str(errors[1])


def test_a_zst_file_without_its_library_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt.zst"
    path.write_bytes(PACK[".zst"](b"text"))

    def absent(name: str) -> None:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(formats, "import_module", absent)
    with pytest.raises(DataError) as raised:
        list(read_text(path, ".zst", Reading(100)))
    assert "minillm-core[zst]" in str(raised.value.fix)


def offered(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, formats.GROUP)


def test_a_format_of_another_distribution_is_found_by_the_end_of_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = offered(".ids.bin", "minillm_core.data.formats:JSONL")
    monkeypatch.setattr(formats, "entry_points", lambda group: [mine])
    assert Formats().of("a.ids.bin") is JSONL
    assert Formats().of("a.bin") is SHARD
    assert Formats().of("a.TXT") is TEXT
    assert Formats().of("a.png") is None


@pytest.mark.parametrize(
    ("offers", "said"),
    [
        ([(".x", "minillm_core.data.formats:GROUP")], "is not a minillm_core.documents.Format"),
        (
            [(".x", "minillm_core.data.formats:JSONL"), (".x", "minillm_core.data.formats:TEXT")],
            "several distributions read .x files",
        ),
    ],
)
def test_a_format_that_cannot_be_used_is_refused(
    monkeypatch: pytest.MonkeyPatch, offers: list[tuple[str, str]], said: str
) -> None:
    monkeypatch.setattr(formats, "entry_points", lambda group: [offered(*one) for one in offers])
    with pytest.raises(Refusal, match=said) as raised:
        Formats().of("a.x")
    assert raised.value.fix


def test_a_giant_line_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "MAX_LINE_BYTES", 1 << 20)
    with pytest.raises(DataError, match="a line longer than 1 MiB") as raised:
        lines(tmp_path, GOOD + b'{"text": "' + b"a" * (1 << 21) + b'"}\n')
    assert f"line 2, byte {len(GOOD)}" in str(raised.value)
    exact = b'{"text": "' + b"a" * ((1 << 20) - 13) + b'"}\n'
    assert len(lines(tmp_path, exact)[0]) == 1


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "a").write_bytes(data)
    for reader, packing in [(read_jsonl, ""), (read_text, ""), (read_text, ".gz"),
                            (read_jsonl, ".xz")]:  # fmt: skip
        refusal = None
        try:
            for document in reader(folder / "a", packing, Reading(100)):
                assert isinstance(document, str | np.ndarray)
        except DataError as error:
            refusal = str(error)
        assert refusal is None or str(folder / "a") in refusal


def test_invalid_text_is_named_with_line_and_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\ntwo\nth\xe9ree")
    with pytest.raises(DataError, match="not UTF-8: byte 0xe9") as raised:
        list(read_text(path, "", Reading(100)))
    assert f"{path}, line 3, byte 13" in str(raised.value)


@pytest.mark.parametrize(("key", "value"), [("labels", [-1, 2]), ("text", "a b")])
def test_nothing_beside_ids_is_unused_without_a_word(
    tmp_path: Path, key: str, value: object
) -> None:
    line = json.dumps({"ids": [1, 2], key: value})
    found, reading = lines(tmp_path, line.encode() + b"\n")
    assert found == [[1, 2]]
    assert reading.notes == {f'left out: "{key}" of lines with "ids"': 1}


@pytest.mark.parametrize("packing", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: b"x" + data[1:], lambda data: b""]
)
def test_a_damaged_archive_is_named(tmp_path: Path, packing: str, damage: Callable) -> None:
    path = tmp_path / f"a.txt{packing}"
    path.write_bytes(damage(PACK[packing](b"text " * 1000)))
    with pytest.raises(DataError, match="damaged or cut short") as raised:
        list(read_text(path, packing, Reading(100)))
    assert raised.value.where == str(path)


def test_reading_counts_the_files_own_bytes(tmp_path: Path) -> None:
    data = lzma.compress(GOOD * 10_000)
    path = tmp_path / "a.jsonl.xz"
    path.write_bytes(data)
    ticks: list[int] = []
    assert len(list(read_jsonl(path, ".xz", Reading(100, ticks.append)))) == 10_000
    assert sum(ticks) == len(data)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        list(read_text(tmp_path / "gone", "", Reading(100)))
