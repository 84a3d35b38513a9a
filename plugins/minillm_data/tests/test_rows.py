"""Rows: kept lines are the input lines, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from minillm_core import DataError
from minillm_data import rows as module
from minillm_data.dedup import dedup
from minillm_data.filter import filter_rows
from minillm_data.inspect import inspect
from minillm_data.mix import mix
from minillm_data.rows import Rows
from minillm_data.texts import Texts

Write = Callable[..., Path]


def test_lines_stay_as_they_stand(tmp_path: Path) -> None:
    lines = [
        b'{"id" : 7, "text":"a\\u00e4"}\n',
        b'{"text": "b", "id": [1.50]}\r\n',
        b'{"text":"c"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    found = list(Rows([tmp_path]))
    assert [row.line for row in found] == [*lines[:2], lines[2] + b"\n"]
    assert [row.text for row in found] == ["aä", "b", "c"]
    assert found[1].where == f"{tmp_path / 'a.jsonl'}, line 2, byte {len(lines[0])}"


def test_texts_chats_and_ids(jsonl: Write, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    shared = [{"from": "human", "value": "Hi"}, {"from": "gpt", "content": None, "value": "Hello"}]
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "Hel"}, {"text": "lo"}]}]
    records = [
        {"messages": chat},
        {"conversations": shared},
        {"text": "", "messages": [chat[0], *parts]},
        {"text": None, "prompt": "Hi", "completion": "Hello"},
        {"prompt": chat[:1], "response": parts},
        {"messages": None, "conversations": shared},
        {"messages": None, "prompt": "Hi", "completion": None, "response": "Hello"},
        {"ids": [1, 2]},
        {"text": ""},
        {"messages": [{"role": "user"}]},
        {"messages": [], "system": "Be brief."},
    ]
    path = jsonl(records, "a.jsonl")
    (tmp_path / "b.txt").write_text("a whole\nfile")
    (tmp_path / "c.md").write_text("")
    rows = Rows([tmp_path])
    found = list(rows)
    assert [row.text for row in found] == [*["Hi\nHello"] * 7, None, "a whole\nfile"]
    lines = path.read_bytes().splitlines(keepends=True)
    assert [row.line for row in found[:8]] == lines[:8]
    assert json.loads(found[8].line) == {"text": "a whole\nfile", "source": str(tmp_path / "b.txt")}
    assert rows.notes == {
        "left out: empty documents": 2,
        "left out: chats whose messages hold no text": 2,
    }
    shown = inspect([path])
    assert (shown.documents, shown.chats, shown.largest_id) == (8, 7, 2)
    assert shown.notes == rows.notes | {"left out: empty documents": 1}
    report = dedup([path], tmp_path / "out", near=False)
    assert report["counts"] == {"kept": 5, "exact duplicate": 3}, "of the same messages"


def test_of_a_line_with_ids_and_text_the_ids_are_read(jsonl: Write, tmp_path: Path) -> None:
    path = jsonl([{"text": "one", "ids": [1, 2]}, {"text": "two", "messages": []}], "a.jsonl")
    rows = Rows([path])
    assert [row.text for row in rows] == [None, "two"]
    assert rows.notes == {'left out: "text" of lines with "ids"': 1}
    with pytest.raises(DataError) as raised:
        filter_rows([path], tmp_path / "out")
    assert str(raised.value.fix).startswith('take "ids" out of the lines')


BAD = {
    b'{"text": "a\\ud800"}': '"text" holds a lone surrogate',
    b"[1]": "a list instead of a JSON object",
    b'{"text": 5}': '"text" is a number, not a string',
    b'{"ids": null, "text": "a"}': '"ids" is not a list of integers',
    b'{"messages": 5}': 'a chat whose messages are not a list, or a "prompt" without a "completion"',
    b'{"prompt": "a"}': 'a chat whose messages are not a list, or a "prompt" without a "completion"',
    b'{"body": "a"}': 'an object with neither "text" nor "ids"',
    b"\xff": "not UTF-8",
    b'{"text"': "not a line of JSON",
}


@pytest.mark.parametrize("line", BAD)
def test_what_cannot_be_read_stops_or_is_counted(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "first"}\n' + line + b'\n{"text": "last"}\n')
    with pytest.raises(DataError) as raised:
        list(Rows([path]))
    assert str(raised.value.where).startswith(f"{path}, line 2, byte ")
    assert raised.value.fix
    rows = Rows([path], "skip")
    assert [row.text for row in rows] == ["first", "last"]
    assert rows.notes == {f"left out: {BAD[line]}": 1}
    assert [row.text for row in rows] == ["first", "last"], "a second time"
    assert rows.notes == {f"left out: {BAD[line]}": 1}


@pytest.mark.parametrize("text", ["word " * 300, "ä" * 600, "\n" * 600], ids=["many", "ä", "LF"])
@pytest.mark.parametrize("suffix", ["txt", "parquet"])
def test_a_document_that_is_too_long_for_a_line_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, text: str
) -> None:
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 1000)
    path = tmp_path / f"a.{suffix}"
    if suffix == "txt":
        path.write_text(text)
    else:
        table = pyarrow.table({"text": ["kept", "b"], "more": ["", text]})
        pyarrow.parquet.write_table(table, path)
    with pytest.raises(DataError, match=r"a document longer than .* as a line of JSON") as raised:
        list(Rows([path]))
    assert str(path) in str(raised.value.where)
    (tmp_path / "b.txt").write_text("short")
    rows = Rows([tmp_path], "skip")
    assert [row.text for row in rows][-1] == "short"
    assert rows.notes == {"left out: a document longer than 0 MiB as a line of JSON": 1}


def test_shards_hold_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(DataError, match="token shards hold no rows"):
        Rows([tmp_path])


def test_progress_is_in_bytes_of_the_files(jsonl: Write) -> None:
    path = jsonl([{"text": "word " * 50}] * 2000)
    seen: list[tuple[str, int, int]] = []
    assert len(list(Rows([path]).read("looking", lambda *now: seen.append(now)))) == 2000
    size = path.stat().st_size
    assert seen[0] == ("looking", 0, size)
    assert seen[-1] == ("looking", size, size)


def test_no_path_is_not_the_default_text() -> None:
    for read in (Rows, Texts, inspect):
        with pytest.raises(DataError, match="no file is named"):
            read([])


def test_files_given_more_than_once_are_named(jsonl: Write, tmp_path: Path) -> None:
    path = jsonl([{"text": "a"}], "a.jsonl")
    said: list[str] = []
    for read in (Rows, Texts, inspect):
        said.clear()
        read([tmp_path, path], say=said.append)
        assert [str(path) in line for line in said if "given more than once" in line] == [True]
        said.clear()
        read([path], say=said.append)
        assert not [line for line in said if "given more than once" in line]
    mix([tmp_path, path], tmp_path.parent / f"{tmp_path.name}_mixed", say=said.append)
    assert any(f"given more than once: {path};" in line for line in said)
