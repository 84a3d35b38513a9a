"""Tests that generated tables are between their marks, and that the rest of a page is unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.page import table
from benchmarks.provenance import machine, unique
from tools import pages

PROSE = st.text("ab <!->\n", max_size=30)
BEGIN, END, OTHER = "\n<!-- made: part -->\n", "<!-- /made -->", "\n<!-- made: other -->\n"
PAGE = pages.Page(Path("page.md"), {"part": lambda: "| made |"}, others=True)


@given(PROSE, PROSE, PROSE)
def test_only_what_is_between_the_marks_changes(before: str, old: str, after: str) -> None:
    again = PAGE.within(f"{before}{BEGIN}{old}{END}{after}")
    assert again == f"{before}{BEGIN}| made |\n{END}{after}"
    assert PAGE.within(again) == again


@pytest.mark.parametrize(
    "text",
    [
        "# A page",
        f"{BEGIN}without an end",
        f"{BEGIN}with another's end{OTHER}{END}",
        f"{BEGIN}{END}" * 2,
    ],
)
def test_a_page_without_each_mark_once_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="part"):
        PAGE.within(text)


def test_a_mark_that_names_no_part_is_refused() -> None:
    text = f"{BEGIN}{END}{OTHER}{END}"
    assert OTHER in PAGE.within(text)
    with pytest.raises(ValueError, match="other"):
        pages.Page(PAGE.path, PAGE.parts).within(text)


def test_it_is_named_or_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("tools.pages.ROOT", tmp_path)
    path = tmp_path / "page.md"
    path.write_text(empty := f"{BEGIN}{END}\n")
    page = pages.Page(path, PAGE.parts)
    monkeypatch.setattr("sys.argv", ["page"])
    pages.main("about", page)
    assert (capsys.readouterr().out, path.read_text()) == ("page.md\n", empty)
    monkeypatch.setattr("sys.argv", ["page", "--write"])
    pages.main("about", page)
    assert path.read_text() == f"{BEGIN}| made |\n{END}\n"
    capsys.readouterr()
    pages.main("about", page)
    assert not capsys.readouterr().out


def test_columns_are_text_or_numbers() -> None:
    assert table(("a", "b", "c"), [("x", "1", "y")], text=(0, -1)).splitlines() == [
        "| a | b | c |",
        "| --- | --: | --- |",
        "| x | 1 | y |",
    ]


def test_what_it_was_measured_on_is_said_in_words() -> None:
    hardware = {"gpus": [], "cores": 2, "processor": "A chip", "system": "Linux 6.1"}
    versions = {"python": "3.11", "torch": "2.13", "mlx": None}
    environment = {"hardware": hardware, "versions": versions, "commit": "0123456789-dirty"}
    said = "2 cores (A chip), Linux; Python 3.11, PyTorch 2.13; commit 0123456-dirty"
    assert machine({"environment": environment}) == said
    hardware["gpus"] = [{"name": "H100"}, {"name": "H100"}]
    assert machine({"environment": environment}).startswith("one H100, Linux; ")
    assert unique(["a", None, "b", "a"]) == "a and b"
